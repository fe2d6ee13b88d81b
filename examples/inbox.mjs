// Ask through the Redis inbox, from Node:
//   npm install redis
//   MILL_KEY=pm-... MODEL=smollm2-135m-instruct node examples/inbox.mjs "What is a mill?"
// REDIS_URL: where your Redis is. [redis://127.0.0.1:6379]
import { randomUUID } from "node:crypto";
import { createClient } from "redis";

const { MILL_KEY: token, MODEL: model, REDIS_URL: url } = process.env;
const content = process.argv[2] ?? "What is a mill?";
const client = await createClient({ url }).connect();
try {
  const replyTo = `promptmill.reply.${randomUUID()}`;
  const body = { model, messages: [{ role: "user", content }], max_tokens: 60 };
  const request = { token, reply_to: replyTo, custom_id: "from-node", body };
  await client.xAdd("promptmill.inbox", "*", { request: JSON.stringify(request) });
  const popped = await client.blPop(replyTo, 120);
  if (popped === null) throw new Error("no answer within two minutes");
  const answer = JSON.parse(popped.element);
  if (answer.error !== null) throw new Error(`${answer.error.code}: ${answer.error.message}`);
  console.log(answer.response.choices[0].message.content);
} finally {
  await client.close();
}
