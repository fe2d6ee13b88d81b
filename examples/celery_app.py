"""Ask through the Celery door, from an application that has Celery (`pip install 'celery[redis]'`) and nothing else:

MILL_KEY=pm-... python celery_app.py redis://127.0.0.1:6379/0 smollm2-135m-instruct "What is a mill?"
"""

import os
import sys

from celery import Celery

url, model, question = sys.argv[1:]
app = Celery(broker=url, backend=url)

asked = app.send_task(
    "promptmill.generate",
    queue="promptmill.door",
    kwargs={
        "token": os.environ["MILL_KEY"],
        "custom_id": "from-celery",
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 60,
    },
    kwargsrepr="(a prompt)",  # else Celery puts the beginning of both prompt and key into the message's headers too
)
try:
    response = asked.get(timeout=120)
except (ValueError, PermissionError) as error:  # what was asked cannot be answered; the text begins with a code
    sys.exit(f"refused: {error}")
except (RuntimeError, TimeoutError) as error:  # ours to repair, or out of time; asking again may help
    sys.exit(f"failed: {error}")
print(response["choices"][0]["message"]["content"])
