//! The answer as one `chat.completion` object, or as a series of `chat.completion.chunk` objects.

use bytes::Bytes;
use cresset_base::{ModelId, RequestId};
use cresset_ledger::{FinishReason, Microcredits};
use cresset_request::{CompleteAnswer, Delta, PartDelta, ScoredToken, TokenScores, UsageObject};
use cresset_text::{AnswerPart, ReadCall};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

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
    /// Null of an answer of calls alone.
    pub content: Option<String>,
    /// What the model thought before; absent of a model that does not think.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallObject>,
    /// Always null; typed clients expect the key.
    #[schemars(with = "()")]
    pub refusal: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "CalledTool")]
pub struct ToolCallObject {
    pub id: String,
    #[schemars(extend("const" = "function"))]
    pub r#type: String,
    pub function: CalledFunction,
}

impl ToolCallObject {
    fn of(id: String, call: &ReadCall) -> Self {
        let ReadCall { name, arguments } = call.clone();
        Self { id, r#type: "function".into(), function: CalledFunction { name, arguments } }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CalledFunction {
    pub name: String,
    /// A JSON text.
    pub arguments: String,
}

/// Letters of the ids of calls: some templates take nothing else, and nine of them.
const ID_LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const ID_LENGTH: usize = 9;

/// The id of an answer's call. It is made from the request's id, so it is the same in every
/// replay, and hardly ever that of a call in another answer.
fn call_id(request: RequestId, call: u32) -> String {
    let digest = Sha256::new().chain_update(request.0).chain_update(call.to_be_bytes()).finalize();
    let letter = |byte: &u8| char::from(ID_LETTERS[usize::from(*byte) % ID_LETTERS.len()]);
    // Counted, so that no two of one answer are equal.
    let letters: String = digest.iter().take(ID_LENGTH - 2).map(letter).collect();
    format!("{letters}{call:02}")
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
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

/// The beginning of a call has its id and name, the pieces that follow have arguments.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ToolCallDelta")]
struct CallDelta<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("const" = "function"))]
    r#type: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize, JsonSchema)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl ChunkWriter {
    pub fn new(id: RequestId, created: u64, model: ModelId, include_usage: bool) -> Self {
        Self { id, created, model, include_usage }
    }

    /// The first chunk, which names the role.
    pub fn first(&self) -> String {
        let delta =
            ChunkDelta { role: Some("assistant"), content: Some(""), ..ChunkDelta::default() };
        self.choice(delta, None, None, None)
    }

    /// The chunks of one delta.
    pub fn delta(&self, delta: &Delta) -> Vec<String> {
        match delta {
            Delta::Part(PartDelta { part, call, scores }) => {
                vec![self.part(part, *call, scores.as_deref().map(Logprobs::of).as_ref())]
            }
            Delta::Finished { reason, usage, reasoning_tokens, charged, scores } => {
                let logprobs = scores.as_deref().map(Logprobs::of);
                let credits = CreditsObject::charged(*charged);
                let usage = UsageObject::of(*usage, *reasoning_tokens);
                self.finish(*reason, logprobs.as_ref(), usage, &credits)
            }
        }
    }

    /// A piece of the answer; `call` is the number of the call that it belongs to.
    fn part(&self, part: &AnswerPart, call: u32, logprobs: Option<&Logprobs>) -> String {
        let begun = |name| CallDelta {
            index: call,
            id: Some(call_id(self.id, call)),
            r#type: Some("function"),
            function: FunctionDelta { name: Some(name), arguments: "" },
        };
        let more = |arguments| CallDelta {
            index: call,
            id: None,
            r#type: None,
            function: FunctionDelta { name: None, arguments },
        };
        let mut delta = ChunkDelta::default();
        match part {
            AnswerPart::Content(text) => delta.content = Some(text),
            AnswerPart::Reasoning(text) => delta.reasoning_content = Some(text),
            AnswerPart::Call { name } => delta.tool_calls = Some([begun(name)]),
            AnswerPart::Arguments(text) => delta.tool_calls = Some([more(text)]),
        }
        self.choice(delta, logprobs, None, None)
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
        let call = |(at, call)| ToolCallObject::of(call_id(answer.id, at), call);
        let (text, thought) = (&answer.text, answer.thought.as_ref());
        let says = !text.is_empty() || answer.calls.is_empty();
        let message = AssistantMessage {
            role: "assistant".into(),
            content: says.then(|| text.clone()),
            reasoning_content: thought.map(|thought| thought.text.clone()),
            tool_calls: (0..).zip(&answer.calls).map(call).collect(),
            refusal: None,
        };
        let logprobs = answer.scores.as_deref().map(Logprobs::of);
        Self {
            id: answer.id,
            object: "chat.completion".into(),
            created: answer.created_at.seconds(),
            model: answer.model,
            choices: [Choice { index: 0, message, logprobs, finish_reason: answer.reason }],
            usage: UsageObject::of(answer.usage, thought.map(|thought| thought.tokens)),
            credits: CreditsObject::charged(answer.charged),
        }
    }

    /// The same answer as a stream tells it, with each part in one piece.
    pub fn chunks(&self, include_usage: bool) -> Vec<String> {
        let writer = ChunkWriter::new(self.id, self.created, self.model, include_usage);
        let [choice] = &self.choices;
        let mut logprobs = choice.logprobs.as_ref();
        let mut chunks = vec![writer.first()];
        for (call, part) in choice.message.parts() {
            chunks.push(writer.part(&part, call, logprobs.take()));
        }
        chunks.extend(writer.finish(choice.finish_reason, logprobs, self.usage, &self.credits));
        chunks
    }
}

impl AssistantMessage {
    /// What the message consists of, each with the number of its call.
    fn parts(&self) -> Vec<(u32, AnswerPart)> {
        let full = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let thought = full(&self.reasoning_content).map(AnswerPart::Reasoning);
        let said = full(&self.content).map(AnswerPart::Content);
        let mut parts: Vec<_> = thought.into_iter().chain(said).map(|part| (0, part)).collect();
        for (call, ToolCallObject { function, .. }) in (0..).zip(&self.tool_calls) {
            parts.push((call, AnswerPart::Call { name: function.name.clone() }));
            parts.push((call, AnswerPart::Arguments(function.arguments.clone())));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_ledger::Usage;
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
            &writer(true).part(&AnswerPart::Content("a\n".into()), 0, None),
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
