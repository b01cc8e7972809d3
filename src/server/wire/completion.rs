//! The answer as one `chat.completion` object, or as a series of `chat.completion.chunk` objects.

use crate::ids::{ModelId, RequestId};
use crate::ledger::{FinishReason, Microcredits, Usage};
use crate::request::transcript::{ScoredToken, TextDelta, TokenScores};
use crate::request::{CompleteAnswer, Delta};
use bytes::Bytes;
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
    pub credits: CreditsObject,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Choice {
    pub index: u32,
    pub message: AssistantMessage,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: FinishReason,
}

#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Reply")]
pub struct AssistantMessage {
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
    pub content: Vec<TokenLogprobObject>,
    #[schemars(with = "()")]
    pub refusal: Option<Vec<TokenLogprobObject>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "TokenLogprob")]
pub struct TokenLogprobObject {
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

impl Logprobs {
    fn of(scores: &[TokenScores]) -> Self {
        let choice = |token: &ScoredToken| TokenChoice {
            token: String::from_utf8_lossy(&token.bytes).into_owned(),
            logprob: token.logprob,
            bytes: token.bytes.clone(),
        };
        let object = |scores: &TokenScores| TokenLogprobObject {
            chosen: choice(&scores.chosen),
            top_logprobs: scores.most_likely.iter().map(choice).collect(),
        };
        Self { content: scores.iter().map(object).collect(), refusal: None }
    }
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
#[schemars(rename = "Credits")]
pub struct CreditsObject {
    #[schemars(extend("const" = "microcredit"))]
    pub unit: String,
    #[serde(rename = "chargedUnits")]
    pub charged_units: Microcredits,
}

impl CreditsObject {
    pub fn charged(units: Microcredits) -> Self {
        Self { unit: "microcredit".into(), charged_units: units }
    }
}

/// Room for a chunk with one token's text.
const CHUNK_BYTES: usize = 384;

/// Renders the chunks of one answer, which share their id, model and time.
#[derive(Clone, Debug)]
pub struct ChunkWriter {
    pub id: RequestId,
    /// Unix seconds.
    created: u64,
    model: ModelId,
    /// If it was asked for, a chunk of its own carries the usage, and all others say
    /// `"usage":null`.
    include_usage: bool,
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
    credits: Option<&'a CreditsObject>,
}

/// A chunk's `usage` can be left out, null, or an object.
#[derive(Clone, Copy, Serialize)]
#[serde(untagged)]
enum UsageField {
    Absent,
    Null,
    Object(UsageObject),
}

impl UsageField {
    fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

#[derive(Serialize, JsonSchema)]
struct ChunkChoice<'a> {
    index: u32,
    delta: ChunkDelta<'a>,
    logprobs: Option<&'a Logprobs>,
    finish_reason: Option<FinishReason>,
}

#[derive(Default, Serialize, JsonSchema)]
#[schemars(rename = "Delta")]
struct ChunkDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "assistant"))]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

impl ChunkWriter {
    pub fn new(id: RequestId, created: u64, model: ModelId, include_usage: bool) -> Self {
        Self { id, created, model, include_usage }
    }

    /// The first chunk, which names the role.
    pub fn first(&self) -> String {
        let delta = ChunkDelta { role: Some("assistant"), content: Some("") };
        self.choice(delta, None, None, None)
    }

    /// The chunks of one delta.
    pub fn delta(&self, delta: &Delta) -> Vec<String> {
        match delta {
            Delta::Text(TextDelta { text, scores }) => {
                vec![self.text(text, scores.as_deref().map(Logprobs::of).as_ref())]
            }
            Delta::Finished { reason, usage, charged, scores } => {
                let logprobs = scores.as_deref().map(Logprobs::of);
                let credits = CreditsObject::charged(*charged);
                self.finish(*reason, logprobs.as_ref(), (*usage).into(), &credits)
            }
        }
    }

    fn text(&self, text: &str, logprobs: Option<&Logprobs>) -> String {
        self.choice(ChunkDelta { content: Some(text), role: None }, logprobs, None, None)
    }

    /// The last chunks: the reason, with the usage on it or after it. `logprobs` belong to tokens
    /// without text of their own.
    fn finish(
        &self,
        reason: FinishReason,
        logprobs: Option<&Logprobs>,
        usage: UsageObject,
        credits: &CreditsObject,
    ) -> Vec<String> {
        let delta = ChunkDelta::default();
        if !self.include_usage {
            return vec![self.choice(delta, logprobs, Some(reason), Some((usage, credits)))];
        }
        let last = self.choice(delta, logprobs, Some(reason), None);
        vec![last, self.chunk(&[], UsageField::Object(usage), Some(credits))]
    }

    fn choice(
        &self,
        delta: ChunkDelta,
        logprobs: Option<&Logprobs>,
        finish_reason: Option<FinishReason>,
        bill: Option<(UsageObject, &CreditsObject)>,
    ) -> String {
        let choice = ChunkChoice { index: 0, delta, logprobs, finish_reason };
        let (usage, credits) = match bill {
            Some((usage, credits)) => (UsageField::Object(usage), Some(credits)),
            None if self.include_usage => (UsageField::Null, None),
            None => (UsageField::Absent, None),
        };
        self.chunk(&[choice], usage, credits)
    }

    fn chunk(
        &self,
        choices: &[ChunkChoice],
        usage: UsageField,
        credits: Option<&CreditsObject>,
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
    /// The body of a complete answer, as it is stored and sent.
    pub fn render(answer: &CompleteAnswer) -> Bytes {
        let completion = Self::of(answer);
        let body = serde_json::to_vec(&completion);
        body.expect("invariant: an answer has only string keys").into()
    }

    fn of(answer: &CompleteAnswer) -> Self {
        let message = AssistantMessage {
            role: "assistant".into(),
            content: answer.text.clone(),
            refusal: None,
        };
        let logprobs = answer.scores.as_deref().map(Logprobs::of);
        Self {
            id: answer.id,
            object: "chat.completion".into(),
            created: answer.created_at.seconds(),
            model: answer.model,
            choices: [Choice { index: 0, message, logprobs, finish_reason: answer.reason }],
            usage: answer.usage.into(),
            credits: CreditsObject::charged(answer.charged),
        }
    }

    /// The same answer as a stream tells it, with the text in one piece.
    pub fn chunks(&self, include_usage: bool) -> Vec<String> {
        let writer = ChunkWriter::new(self.id, self.created, self.model, include_usage);
        let [choice] = &self.choices;
        let (text, logprobs) = (&choice.message.content, choice.logprobs.as_ref());
        let mut chunks = vec![writer.first()];
        if !text.is_empty() {
            chunks.push(writer.text(text, logprobs));
        }
        let without_text = logprobs.filter(|_| text.is_empty());
        let reason = choice.finish_reason;
        chunks.extend(writer.finish(reason, without_text, self.usage, &self.credits));
        chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn writer(include_usage: bool) -> ChunkWriter {
        ChunkWriter::new(RequestId(Uuid::nil()), 7, ModelId(Uuid::nil()), include_usage)
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
        let credits = CreditsObject::charged(Microcredits::new(9).unwrap());
        let bill = r#""usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}},"credits":{"unit":"microcredit","chargedUnits":"9"}}"#;
        check(
            &writer(false).first(),
            r#""choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}"#,
        );
        check(
            &writer(true).text("a\n", None),
            r#""choices":[{"index":0,"delta":{"content":"a\n"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
        );
        let unasked = writer(false).finish(FinishReason::Stop, None, usage, &credits);
        assert_eq!(unasked.len(), 1);
        let last = r#""choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"#;
        check(&unasked[0], &format!("{last}{bill}"));
        let asked = writer(true).finish(FinishReason::Stop, None, usage, &credits);
        check(&asked[0], &format!("{last}\"usage\":null}}"));
        check(&asked[1], &format!("\"choices\":[],{bill}"));
        assert!(asked.len() == 2 && asked.iter().all(|chunk| !chunk.contains('\n')));
    }
}
