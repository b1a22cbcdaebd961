/* How other programs reach this server: the base URL, and what to paste for three of them. Pure. */

/* For a page at ``origin`` with this model: [name, text]. The page never has a key: its own is a cookie. */
export function snippets(origin, model) {
  const base = `${origin}/v1`, quoted = JSON.stringify(model);
  return [
    ["curl", `curl ${base}/chat/completions -H "Authorization: Bearer $KEY" \\
  -H "Content-Type: application/json" \\
  -d '${JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }).replaceAll("'", "'\\''")}'`],
    ["Python (openai)", `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key="KEY")
messages = [{"role": "user", "content": "Hello"}]
answer = client.chat.completions.create(model=${quoted}, messages=messages)
print(answer.choices[0].message.content)`],
    ["Continue (config.yaml)", `models:
  - name: splitinfer
    provider: openai
    model: ${quoted}
    apiBase: ${base}
    apiKey: KEY
    roles: [chat, edit]`],
  ];
}
