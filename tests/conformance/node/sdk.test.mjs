// The gateway through the real `openai` package for Node. Run by tests/conformance/test_node_sdk.py, which says in the
// environment where the gateway is. Each test stands alone; they share one tenant.

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http";
import { test } from "node:test";

import OpenAI, { toFile } from "openai";

const { BASE_URL, API_KEY, LIMITED_KEY, MODEL } = process.env;
const PATIENCE_MS = 240_000;
const FINAL = ["completed", "failed", "expired", "cancelled"];

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY });

function promptLine(customId, prompt, url = "/v1/completions") {
  const body = { model: MODEL, prompt, max_tokens: 8 };
  return { custom_id: customId, method: "POST", url, body };
}

function upload(lines, name = "input.jsonl") {
  const text = lines.map((line) => JSON.stringify(line) + "\n").join("");
  return toFile(Buffer.from(text), name).then((file) => client.files.create({ file, purpose: "batch" }));
}

async function createBatch(lines, options = {}) {
  const file = await upload(lines);
  return client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/completions",
    completion_window: "24h",
    ...options,
  });
}

async function until(holds, what) {
  const deadline = Date.now() + PATIENCE_MS;
  for (;;) {
    const found = await holds();
    if (found) return found;
    assert.ok(Date.now() < deadline, `${what} did not come`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

function ended(id) {
  return until(async () => {
    const batch = await client.batches.retrieve(id);
    return FINAL.includes(batch.status) ? batch : null;
  }, `the end of ${id}`);
}

async function collect(pages) {
  const ids = [];
  for await (const each of pages) ids.push(each.id);
  return ids;
}

test("files are uploaded, described, read and deleted", async () => {
  const lines = [promptLine("a", "one"), promptLine("b", "zwölf Bögen")];
  const file = await upload(lines, "naïve.jsonl");
  assert.deepEqual(
    [file.object, file.purpose, file.status, file.filename, file.status_details],
    ["file", "batch", "processed", "naïve.jsonl", null],
  );
  assert.deepEqual(await client.files.retrieve(file.id), file);
  const text = await (await client.files.content(file.id)).text();
  assert.equal(Buffer.byteLength(text), file.bytes);
  assert.deepEqual(text.trimEnd().split("\n").map((row) => JSON.parse(row)), lines);
  assert.equal((await client.files.waitForProcessing(file.id, { pollInterval: 10 })).id, file.id);
  assert.deepEqual(await client.files.delete(file.id), { id: file.id, object: "file", deleted: true });
  await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
});

test("lists go on by themselves over more objects than a page has", async () => {
  const files = [];
  for (let number = 0; number < 7; number++) {
    files.push((await upload([promptLine("a", `page ${number}`)], `page-${number}.jsonl`)).id);
  }
  const mine = async (pages) => (await collect(pages)).filter((id) => files.includes(id));
  assert.deepEqual(await mine(client.files.list({ limit: 2, order: "asc" })), files);
  assert.deepEqual(await mine(client.files.list({ limit: 3 })), files.toReversed());
  const batches = [];
  for (const id of files.slice(0, 5)) {
    const options = { input_file_id: id, endpoint: "/v1/completions", completion_window: "24h" };
    batches.push((await client.batches.create(options)).id);
  }
  const found = await collect(client.batches.list({ limit: 2 }));
  assert.deepEqual(found.filter((id) => batches.includes(id)), batches.toReversed());
  const page = await client.batches.list({ limit: 2 });
  assert.deepEqual([page.data.length, page.has_more, page.hasNextPage()], [2, true, true]);
  assert.notEqual((await page.getNextPage()).data[0].id, page.data[1].id);
});

test("a batch is created, polled to its end and read", async () => {
  const lines = [promptLine("good", "What is the end?"), promptLine("long", "x".repeat(4000))];
  const made = await createBatch(lines, { metadata: { of: "node" } });
  assert.deepEqual([made.object, made.status, made.errors], ["batch", "validating", null]);
  assert.deepEqual(made.request_counts, { total: 0, completed: 0, failed: 0 });
  const batch = await ended(made.id);
  assert.equal(batch.status, "completed");
  assert.deepEqual(batch.request_counts, { total: 2, completed: 1, failed: 1 });
  assert.deepEqual([batch.model, batch.metadata.of, batch.usage.output_tokens], [MODEL, "node", 8]);
  const read = async (id) => JSON.parse(await (await client.files.content(id)).text());
  const output = await read(batch.output_file_id);
  assert.deepEqual([output.custom_id, output.response.status_code, output.error], ["good", 200, null]);
  assert.ok("What is the end?".endsWith(output.response.body.choices[0].text));
  const failed = await read(batch.error_file_id);
  assert.deepEqual([failed.custom_id, failed.response.status_code, failed.error], ["long", 400, null]);
  await assert.rejects(client.batches.cancel(batch.id), OpenAI.BadRequestError);
});

test("a bad file fails its batch, naming the line", async () => {
  const batch = await ended((await createBatch([promptLine("a", "x"), promptLine("b", "y", "/v1/other")])).id);
  assert.equal(batch.status, "failed");
  assert.deepEqual(batch.errors.data.map((each) => [each.code, each.line]), [["url_mismatch", 2]]);
});

test("a batch is cancelled", async () => {
  const lines = Array.from({ length: 2000 }, (_, number) => promptLine(`r${number}`, `number ${number}`));
  const made = await createBatch(lines, { paused: true }); // no worker can be quicker than the call
  assert.ok(["cancelling", "cancelled"].includes((await client.batches.cancel(made.id)).status));
  assert.equal((await ended(made.id)).status, "cancelled");
});

const messages = [{ role: "user", content: "What comes after no. 42" }];

test("a chat answer comes whole and token by token alike", async () => {
  const whole = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 40 });
  assert.deepEqual([whole.object, whole.choices[0].message.role], ["chat.completion", "assistant"]);
  const stream = await client.chat.completions.create({
    model: MODEL,
    messages,
    max_tokens: 40,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  let reason = null;
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    text += chunk.choices[0]?.delta.content ?? "";
    reason = chunk.choices[0]?.finish_reason ?? reason;
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.match(text, /42/);
  assert.equal(reason, whole.choices[0].finish_reason);
  assert.deepEqual(usage.total_tokens, whole.usage.total_tokens);
});

test("the SDK's own gathering of a stream gives the same answer", async () => {
  const runner = client.chat.completions.stream({ model: MODEL, messages, max_tokens: 8 });
  const pieces = [];
  runner.on("content", (delta) => pieces.push(delta));
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.content, pieces.join(""));
});

test("a stream can be left in the midst of it", async () => {
  const stream = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 40, stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});

test("a text is gone on with", async () => {
  const prompt = "This is how it ends";
  const whole = await client.completions.create({ model: MODEL, prompt, max_tokens: 8 });
  assert.equal(whole.object, "text_completion");
  let text = "";
  for await (const chunk of await client.completions.create({ model: MODEL, prompt, max_tokens: 8, stream: true })) {
    text += chunk.choices[0]?.text ?? "";
  }
  assert.equal(text, whole.choices[0].text);
});

test("models are listed", async () => {
  assert.deepEqual(await collect(client.models.list()), [MODEL]);
  assert.equal((await client.models.retrieve(MODEL)).owned_by, "promptmill");
});

test("failures are the SDK's own errors", async () => {
  const stranger = new OpenAI({ baseURL: BASE_URL, apiKey: "pm-wrong" });
  await assert.rejects(stranger.models.list(), (error) => {
    assert.ok(error instanceof OpenAI.AuthenticationError);
    assert.deepEqual([error.status, error.code], [401, "invalid_api_key"]);
    return true;
  });
  await assert.rejects(client.batches.retrieve("batch_none"), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.deepEqual([error.code, error.param], ["batch_not_found", "id"]);
    return true;
  });
  await assert.rejects(client.chat.completions.create({ model: "another", messages }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ model: MODEL, messages, max_tokens: 100_000 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.code, "max_tokens_exceeds_context");
    assert.ok(error.requestID);
    return true;
  });
  const limited = new OpenAI({ baseURL: BASE_URL, apiKey: LIMITED_KEY, maxRetries: 0 });
  await assert.rejects(
    until(() => limited.models.list().then(() => null), "the quota's effect"),
    (error) => {
      assert.ok(error instanceof OpenAI.RateLimitError);
      assert.equal(error.type, "rate_limit_error");
      assert.ok(Number(error.headers.get("retry-after")) > 0);
      return true;
    },
  );
});

test("a webhook tells of a batch's end, and the SDK verifies it", async () => {
  const deliveries = [];
  const receiver = createServer((request, response) => {
    const pieces = [];
    request.on("data", (piece) => pieces.push(piece));
    request.on("end", () => {
      deliveries.push({ body: Buffer.concat(pieces).toString(), headers: request.headers });
      response.end();
    });
  });
  receiver.listen(0, "127.0.0.1");
  await once(receiver, "listening");
  const endpoint = await client.webhooks.create({
    url: `http://127.0.0.1:${receiver.address().port}/hook`,
    event_types: ["batch.completed", "batch.failed"],
    name: "node",
  });
  try {
    const secret = endpoint.signing_secret;
    const made = await createBatch([promptLine("a", "tell me when it ends")]);
    const find = async () => {
      for (const { body, headers } of deliveries) {
        const event = await client.webhooks.unwrap(body, headers, secret);
        if (event.data.id === made.id) return { event, body, headers };
      }
      return null;
    };
    const { event, body, headers } = await until(find, "the webhook");
    assert.deepEqual([event.object, event.type], ["event", "batch.completed"]);
    const forged = body.replace(made.id, "batch_forged");
    await assert.rejects(client.webhooks.unwrap(forged, headers, secret), OpenAI.InvalidWebhookSignatureError);
  } finally {
    await client.webhooks.delete(endpoint.id);
    receiver.close();
    receiver.closeAllConnections();
  }
});
