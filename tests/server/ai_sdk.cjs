// Asks a server by the AI SDK and writes what came as one JSON object: `node ai_sdk.cjs URL openai-compatible|openai`.
const { generateText, streamText, tool, stepCountIs, APICallError } = require('ai');
const { z } = require('zod');

const [url, name] = process.argv.slice(2);
const settings = { name: 'm', baseURL: url, apiKey: 'none', includeUsage: true };
const provider = name === 'openai'
  ? require('@ai-sdk/openai').createOpenAI(settings)
  : require('@ai-sdk/openai-compatible').createOpenAICompatible(settings);
const model = name === 'openai' ? provider.chat('m') : provider('m');
const prompt = 'How is it in Bonn?';

const cities = [];
const weather = tool({
  description: 'Tell how the weather is in a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => { cities.push(city); return 'sunny'; },
});
const tooled = { model, prompt, tools: { weather }, stopWhen: stepCountIs(3), maxRetries: 0 };

async function errorOf(call) {
  try { await call(); return null; }
  catch (error) { return [APICallError.isInstance(error), error.statusCode, error.message]; }
}

(async () => {
  const found = {};
  const plain = await generateText({ model, prompt, maxRetries: 0 });
  found.plain = [plain.text, plain.finishReason, plain.usage.outputTokens, plain.usage.inputTokens];
  const limited = await generateText({ model, prompt, maxOutputTokens: 3, maxRetries: 0 });
  found.limited = [limited.text, limited.finishReason];
  const stream = streamText({ model, prompt, maxRetries: 0 });
  found.pieces = [];
  for await (const piece of stream.textStream) found.pieces.push(piece);
  found.streamed = [await stream.finishReason, (await stream.usage).outputTokens];
  const answered = await generateText(tooled);
  found.tools = [answered.text, answered.steps.map(step => step.toolCalls.map(call => [call.toolName, call.input]))];
  const asked = streamText(tooled);
  found.parts = {};
  for await (const part of asked.fullStream) found.parts[part.type] = (found.parts[part.type] || 0) + 1;
  found.streamedTools = await asked.text;
  found.cities = cities;
  found.tooHot = await errorOf(() => generateText({ model, prompt, temperature: -1, maxRetries: 0 }));
  found.noModel = await errorOf(() =>
    generateText({ model: name === 'openai' ? provider.chat('x') : provider('x'), prompt, maxRetries: 0 }));
  found.streamedError = await new Promise(resolve => {
    const failing = streamText({ model, prompt, temperature: -1, maxRetries: 0,
                                 onError: ({ error }) => resolve([error.statusCode, error.message]) });
    failing.consumeStream();
  });
  console.log(JSON.stringify(found));
})();
