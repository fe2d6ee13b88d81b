"""Hear of ended batches: check each event with the `openai` package, as for OpenAI's own webhooks.

    promptmill webhook add https://example.com/hook          # prints the secret
    OPENAI_WEBHOOK_SECRET=whsec_... python webhook_receiver.py 8088

Put it behind a server that brings TLS; events go to https addresses alone, unless yours is in a network that
PROMPTMILL_WEBHOOK_ALLOWED_NETWORKS names.
"""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai

client = openai.OpenAI(api_key="not needed here")  # reads OPENAI_WEBHOOK_SECRET
seen: set[str] = set()  # an event may come twice, with the same id: keep them where they outlive you


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            event = client.webhooks.unwrap(body, self.headers)
        except (openai.InvalidWebhookSignatureError, ValueError) as error:
            print(f"refused: {error}", flush=True)
            self.send_response(400)
        else:
            if event.id not in seen:
                seen.add(event.id)
                print(event.type, event.data.id, flush=True)
            self.send_response(200)  # answer first, work later: after ten seconds the event is sent again
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
