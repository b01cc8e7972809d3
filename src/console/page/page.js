"use strict";

// The live part of a page: the node sends it again and again while the page is looked at.
const live = document.getElementById("live");
if (live) {
  let source = null;
  const show = (event) => {
    // What a person selects or has the focus in stays as it is.
    const selected = String(document.getSelection());
    if (!selected && !live.contains(document.activeElement)) live.innerHTML = event.data;
  };
  const follow = () => {
    if (document.hidden) {
      if (source) source.close();
      source = null;
    } else if (!source) {
      source = new EventSource(live.dataset.events);
      source.addEventListener("part", show);
    }
  };
  document.addEventListener("visibilitychange", follow);
  follow();
}

const chat = document.getElementById("chat");
if (chat) {
  const turns = document.getElementById("turns");
  const button = chat.querySelector("button");
  let messages = [];
  let session = crypto.randomUUID();

  const turn = (role, text) => {
    const part = document.createElement("p");
    part.className = `turn ${role}`;
    part.textContent = text;
    turns.append(part);
    return part;
  };

  // The payloads of a stream of events, as they come.
  async function* payloads(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }

  async function ask(message) {
    const asked = [...messages, { role: "user", content: message }];
    turn("user", message);
    const answer = turn("assistant", "");
    const response = await fetch("/chat", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        form: chat.dataset.form,
        account: chat.elements.account.value,
        model: chat.elements.model.value,
        messages: asked,
        key: crypto.randomUUID(),
        session,
      }),
    });
    if (!response.ok) {
      const text = await response.text();
      let told = text;
      try {
        told = JSON.parse(text).error.message;
      } catch {}
      answer.className = "turn error";
      answer.textContent = told;
      return;
    }
    for await (const data of payloads(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) {
        answer.className = "turn error";
        answer.textContent = chunk.error.message;
        return;
      }
      answer.textContent += chunk.choices?.[0]?.delta?.content ?? "";
      if (chunk.credits) {
        const units = Number(chunk.credits.chargedUnits);
        answer.title = `${units / 1e6} credits`;
        turn("cost", `${units / 1e6} credits`);
      }
    }
    messages = [...asked, { role: "assistant", content: answer.textContent }];
  }

  chat.addEventListener("submit", async (event) => {
    event.preventDefault();
    const message = chat.elements.message.value.trim();
    if (!message) return;
    chat.elements.message.value = "";
    button.disabled = true;
    try {
      await ask(message);
    } catch (error) {
      turn("error", String(error));
    }
    button.disabled = false;
    chat.elements.message.focus();
  });
  chat.addEventListener("reset", () => {
    messages = [];
    session = crypto.randomUUID();
    turns.replaceChildren();
  });
  chat.elements.message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      chat.requestSubmit();
    }
  });
}
