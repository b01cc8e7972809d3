//! The answer: `chat.completion` as one object, or cut into `chat.completion.chunk` events.

use crate::ids::{ModelId, RequestId};
use crate::ledger::{FinishReason, Microcredits, Usage};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The whole answer; also what is stored for replay.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ChatCompletion")]
pub struct Completion {
    pub id: RequestId,
    #[schemars(extend("const" = "chat.completion"))]
    pub object: String,
    /// Unix seconds.
    pub created: u64,
    pub model: ModelId,
    pub choices: [Choice; 1],
    pub usage: UsageObject,
    pub credits: Credits,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Choice {
    pub index: u32,
    pub message: Reply,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: FinishReason,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Reply {
    #[schemars(extend("const" = "assistant"))]
    pub role: String,
    pub content: String,
    /// Always null; typed clients expect the key.
    #[schemars(with = "()")]
    pub refusal: Option<String>,
}

/// Log-probabilities of the tokens behind a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Logprobs {
    pub content: Vec<TokenLogprob>,
    #[schemars(with = "()")]
    pub refusal: Option<Vec<TokenLogprob>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenLogprob {
    #[serde(flatten)]
    pub chosen: TokenChoice,
    pub top_logprobs: Vec<TokenChoice>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokenChoice {
    /// The token's text; U+FFFD stands for bytes that are no character by themselves.
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Usage")]
pub struct UsageObject {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PromptTokensDetails {
    pub cached_tokens: u32,
}

impl From<Usage> for UsageObject {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
            prompt_tokens_details: PromptTokensDetails { cached_tokens: usage.cached_tokens },
        }
    }
}

/// What a request was charged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Credits {
    #[schemars(extend("const" = "microcredit"))]
    pub unit: String,
    #[serde(rename = "chargedUnits")]
    pub charged_units: Microcredits,
}

impl Credits {
    pub fn charged(units: Microcredits) -> Self {
        Self { unit: "microcredit".into(), charged_units: units }
    }
}

/// Room for a chunk with one token's text.
const CHUNK_BYTES: usize = 384;

/// What all chunks of one answer share.
#[derive(Clone, Debug)]
pub struct Header {
    pub id: RequestId,
    pub created: u64,
    pub model: ModelId,
    /// Asked for: a chunk of its own carries the usage, and all others say `"usage":null`.
    pub include_usage: bool,
}

/// One event of a stream.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ChatCompletionChunk")]
pub struct Chunk<'a> {
    id: RequestId,
    #[schemars(extend("const" = "chat.completion.chunk"))]
    object: &'static str,
    created: u64,
    model: ModelId,
    #[schemars(length(max = 1))]
    choices: &'a [ChunkChoice<'a>],
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    #[schemars(with = "Option<UsageObject>")]
    usage: UsageField,
    #[serde(skip_serializing_if = "Option::is_none")]
    credits: Option<&'a Credits>,
}

/// A chunk's `usage`: not there, null, or told.
#[derive(Clone, Copy, Serialize)]
#[serde(untagged)]
enum UsageField {
    Absent,
    Null,
    Told(UsageObject),
}

impl UsageField {
    fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

#[derive(Serialize, JsonSchema)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<&'a Logprobs>,
    finish_reason: Option<FinishReason>,
}

#[derive(Default, Serialize, JsonSchema)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "assistant"))]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl Header {
    /// The first chunk.
    pub fn role(&self) -> String {
        self.choice(Delta { role: Some("assistant"), content: Some("") }, None, None, None)
    }

    pub fn delta(&self, text: &str, logprobs: Option<&Logprobs>) -> String {
        self.choice(Delta { content: Some(text), role: None }, logprobs, None, None)
    }

    /// The last chunks: the reason, with the usage on it or after it. `logprobs` belong to tokens
    /// without text of their own.
    pub fn finish(
        &self,
        reason: FinishReason,
        logprobs: Option<&Logprobs>,
        usage: UsageObject,
        credits: &Credits,
    ) -> Vec<String> {
        if !self.include_usage {
            return vec![self.choice(
                Delta::default(),
                logprobs,
                Some(reason),
                Some((usage, credits)),
            )];
        }
        let last = self.choice(Delta::default(), logprobs, Some(reason), None);
        vec![last, self.chunk(&[], UsageField::Told(usage), Some(credits))]
    }

    fn choice(
        &self,
        delta: Delta,
        logprobs: Option<&Logprobs>,
        finish_reason: Option<FinishReason>,
        bill: Option<(UsageObject, &Credits)>,
    ) -> String {
        let choice = ChunkChoice { index: 0, delta, logprobs, finish_reason };
        let (usage, credits) = match bill {
            Some((usage, credits)) => (UsageField::Told(usage), Some(credits)),
            None if self.include_usage => (UsageField::Null, None),
            None => (UsageField::Absent, None),
        };
        self.chunk(&[choice], usage, credits)
    }

    fn chunk(
        &self,
        choices: &[ChunkChoice],
        usage: UsageField,
        credits: Option<&Credits>,
    ) -> String {
        let Self { id, created, model, .. } = *self;
        let chunk =
            Chunk { id, object: "chat.completion.chunk", created, model, choices, usage, credits };
        // A token's chunk fits, so its buffer does not grow on the way.
        let mut text = Vec::with_capacity(CHUNK_BYTES);
        serde_json::to_writer(&mut text, &chunk).expect("invariant: a chunk has only string keys");
        String::from_utf8(text).expect("invariant: JSON is UTF-8")
    }
}

impl Completion {
    pub fn new(header: &Header, choice: Choice, usage: UsageObject, credits: Credits) -> Self {
        let Header { id, created, model, .. } = *header;
        Self {
            id,
            object: "chat.completion".into(),
            created,
            model,
            choices: [choice],
            usage,
            credits,
        }
    }

    /// The same answer as a stream tells it, the text in one piece.
    pub fn chunks(&self, include_usage: bool) -> Vec<String> {
        let header =
            Header { id: self.id, created: self.created, model: self.model, include_usage };
        let [choice] = &self.choices;
        let mut chunks = vec![header.role()];
        if !choice.message.content.is_empty() {
            chunks.push(header.delta(&choice.message.content, choice.logprobs.as_ref()));
        }
        let spare = choice.logprobs.as_ref().filter(|_| choice.message.content.is_empty());
        chunks.extend(header.finish(choice.finish_reason, spare, self.usage, &self.credits));
        chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn header(include_usage: bool) -> Header {
        Header {
            id: RequestId(Uuid::nil()),
            created: 7,
            model: ModelId(Uuid::nil()),
            include_usage,
        }
    }

    fn check(actual: &str, expect_after_model: &str) {
        let id = Uuid::nil();
        let head = format!(
            r#"{{"id":"{id}","object":"chat.completion.chunk","created":7,"model":"{id}","#
        );
        assert_eq!(actual.strip_prefix(&head), Some(expect_after_model), "{actual}");
    }

    #[test]
    fn chunks_to_the_byte() {
        let usage = Usage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: 2 }.into();
        let credits = Credits::charged(Microcredits::new(9).unwrap());
        let bill = r#""usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}},"credits":{"unit":"microcredit","chargedUnits":"9"}}"#;
        check(
            &header(false).role(),
            r#""choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
        );
        check(
            &header(true).delta("a\n", None),
            r#""choices":[{"index":0,"delta":{"content":"a\n"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
        );
        let unasked = header(false).finish(FinishReason::Stop, None, usage, &credits);
        assert_eq!(unasked.len(), 1);
        let last = r#""choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"#;
        check(&unasked[0], &format!("{last}{bill}"));
        let asked = header(true).finish(FinishReason::Stop, None, usage, &credits);
        check(&asked[0], &format!("{last}\"usage\":null}}"));
        check(&asked[1], &format!("\"choices\":[],{bill}"));
        assert!(asked.len() == 2 && asked.iter().all(|chunk| !chunk.contains('\n')));
    }
}
