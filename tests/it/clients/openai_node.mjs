// The openai package against a node: models, completions, streams, errors, retries.
// Arguments: base address, key.
import assert from 'node:assert/strict';
import { randomUUID } from 'node:crypto';
import OpenAI from 'openai';

// Gives each call one request id, which the client's own retries keep.
class Node extends OpenAI {
  idempotencyHeader = 'Idempotency-Key';
  defaultIdempotencyKey() {
    return randomUUID();
  }
}

const [base, key] = process.argv.slice(2);
const client = (apiKey) =>
  new Node({ baseURL: `${base}/v1`, apiKey, defaultHeaders: { 'X-Service-Session-Id': randomUUID() }, maxRetries: 1 });
const node = client(key);
const messages = [{ role: 'user', content: 'Say hello.' }];

const refused = async (kind, code, call) =>
  assert.rejects(call, (error) => error instanceof kind && error.code === code, `${code} was not raised`);

const models = (await node.models.list()).data;
assert.equal(models.length, 1);
const model = models[0].id;
assert.equal((await node.models.retrieve(model)).id, model);

const body = { model, messages, max_tokens: 12, seed: 5, temperature: 0.8 };
const whole = await node.chat.completions.create(body);
assert.ok(['stop', 'length'].includes(whole.choices[0].finish_reason));
assert.ok(whole.usage.completion_tokens >= 1 && whole.usage.completion_tokens <= 12);
assert.ok(BigInt(whole.credits.chargedUnits) >= 1n);

let text = '';
let usage;
for await (const chunk of await node.chat.completions.create({ ...body, stream: true })) {
  text += chunk.choices[0]?.delta?.content ?? '';
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

// The helper that assembles a stream insists on a role, a finish reason and no stray events.
const assembled = await node.chat.completions.stream(body).finalChatCompletion();
assert.equal(assembled.choices[0].message.content, text);

const again = { headers: { 'Idempotency-Key': whole.id } };
assert.deepEqual(await node.chat.completions.create(body, again), whole);

await refused(OpenAI.AuthenticationError, 'invalid_credential', () => client('junk').models.list());
await refused(OpenAI.NotFoundError, 'model_not_found', () => node.chat.completions.create({ ...body, model: randomUUID() }));
await refused(OpenAI.BadRequestError, 'invalid_request', () => node.chat.completions.create({ ...body, n: 2 }));
await refused(OpenAI.UnprocessableEntityError, 'idempotency_key_reused', () =>
  node.chat.completions.create({ ...body, max_tokens: 3 }, again));
console.log('ok');
