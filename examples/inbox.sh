#!/usr/bin/env bash
# Ask through the Redis inbox, with redis-cli and a shell:
#   MILL_KEY=pm-... MODEL=smollm2-135m-instruct examples/inbox.sh "What is a mill?"
# REDIS_CLI: how your Redis is reached, such as "redis-cli -h redis.example -a secret". jq is not needed.
set -euo pipefail

redis=${REDIS_CLI:-redis-cli}
question=${1:?usage: inbox.sh QUESTION}
reply=promptmill.reply.$$-$RANDOM

# A shell's text as a JSON string.
quoted=${question//\\/\\\\}
quoted=${quoted//\"/\\\"}
quoted=${quoted//$'\n'/\\n}

# -x reads the last argument from standard input, so that neither key nor question stands in the process list.
$redis -x XADD promptmill.inbox '*' request > /dev/null <<JSON
{"token": "$MILL_KEY", "reply_to": "$reply",
 "body": {"model": "$MODEL", "messages": [{"role": "user", "content": "$quoted"}], "max_tokens": 60}}
JSON

# The list's name, then the answer; nothing when none came in time.
answer=$($redis --raw BLPOP "$reply" 120 | tail -n 1)
[ -n "$answer" ] || { echo "no answer within two minutes" >&2; exit 1; }
echo "$answer"
# Its last field is the error, null where there is none.
[[ $answer == *'"error":null}' ]]
