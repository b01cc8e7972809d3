//! The subject of a qualification: it tokenises, renders and generates.

use crate::policy::policy;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatTurn {
    pub role: String,
    pub content: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl ChatTurn {
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.into(), content: content.into(), name: None, tool_call_id: None }
    }
}

/// A call of a function, or what was read as one.
#[derive(Clone, Debug, PartialEq)]
pub struct CalledTool {
    pub name: String,
    pub arguments: Value,
}

/// A question, the tools that are offered with it, and the call that answers it.
#[derive(Clone, Debug)]
pub struct ToolCase {
    /// In OpenAI's form.
    pub tools: Vec<Value>,
    pub question: String,
    pub call: CalledTool,
}

/// A conversation with a call, as a template renders it.
#[derive(Clone, Debug)]
pub struct WrittenCall {
    /// The prompt that asks for the answer.
    pub prompt: String,
    /// The calls that the reader of answers finds in the text of the template.
    pub calls: Vec<CalledTool>,
}

/// One generation. The defaults are greedy, without stop strings, going on past end-of-text.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Prefix caches are isolated between tenants: a fresh tenant sees a cold cache.
    pub tenant: u32,
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    pub seed: u64,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    /// Pairs of an id and a value that is added to its logit.
    pub bias: Vec<(u32, f32)>,
    /// The asker goes away after this many tokens.
    pub leaves_after: Option<u32>,
}

impl Request {
    pub fn greedy(tenant: u32, prompt: &[u32], max_tokens: u32) -> Self {
        Self {
            tenant,
            prompt: prompt.to_vec(),
            max_tokens,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            stop: Vec::new(),
            ignore_eos: true,
            bias: Vec::new(),
            leaves_after: None,
        }
    }

    pub fn sampled(tenant: u32, prompt: &[u32], max_tokens: u32, seed: u64) -> Self {
        Self { temperature: 1.0, seed, ..Self::greedy(tenant, prompt, max_tokens) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// End-of-text or a stop string.
    Stop,
    Length,
}

/// Natural-log probabilities of one position under the model's own distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionLogprob {
    pub chosen: f32,
    /// Most likely first.
    pub top: Vec<(u32, f32)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    pub tokens: Vec<u32>,
    /// One per token, with the [`TOP_LOGPROBS`] most likely alternatives.
    pub logprobs: Vec<PositionLogprob>,
    /// The text as it was streamed, piece by piece.
    pub deltas: Vec<String>,
    pub finish: Finish,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub completion_tokens: u32,
}

impl Generation {
    pub fn text(&self) -> String {
        self.deltas.concat()
    }
}

/// The way by which a given text is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScorePath {
    /// As a prompt, in chunks.
    Prefill,
    /// Token by token after the beginnings of the text, several of them side by side.
    Decode,
}

/// How exactly the subject computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// f32 throughout.
    Exact,
    /// f32 with activations of sixteen bits at quantised weights, and K and V in f16.
    Stored,
    /// As `Stored`, with activations of eight bits.
    Bytes,
    /// bf16 on a device.
    Bf16,
}

impl Precision {
    /// The lead of the most likely token over the second up to which two engines, of which one
    /// computes so and the other in f32, may choose differently, nat.
    pub fn decisive_margin(self) -> f32 {
        let margins = &policy().margin;
        let margin = match self {
            Self::Exact => &margins.exact,
            Self::Stored => &margins.stored,
            Self::Bytes => &margins.bytes,
            Self::Bf16 => &margins.bf16,
        };
        margin.value as f32
    }
}

/// What a second implementation of the same model says of a text.
#[derive(Clone, Debug, PartialEq)]
pub enum Witnessed {
    /// There is none, for this reason.
    Absent(String),
    Scores {
        /// Which implementation, in what precision.
        by: String,
        rows: Vec<WitnessRow>,
    },
}

/// The distribution of the token that follows a position.
#[derive(Clone, Debug, PartialEq)]
pub struct WitnessRow {
    pub position: usize,
    /// The two most likely tokens with their log-probabilities.
    pub top: [(u32, f32); 2],
    /// Log-probabilities of the ids that were asked for, in their order.
    pub wanted: Vec<f32>,
}

/// How far the kernels are from a stored reference.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelDistance {
    pub name: String,
    /// Largest difference of a log-probability among the 20 most likely; 0 of a single product.
    pub most: f64,
    /// Squares of the differences relative to those of the values.
    pub relative: f64,
    /// Whether activations are rounded on the way.
    pub rounded: bool,
}

/// What the values of a tensor are like, as its file stores them.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightStats {
    /// As the file names it.
    pub name: String,
    /// Whether no value is infinite or none at all.
    pub finite: bool,
    /// Root of the mean of the squares of all values but the largest.
    pub rms: f64,
    /// Largest absolute value.
    pub max: f32,
}

/// Alternatives that every generation reports per position.
pub const TOP_LOGPROBS: u8 = 20;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    /// A correct answer to input that cannot be served (too long, or a role that the template does
    /// not have).
    #[error("refused: {0}")]
    Refused(String),
    /// The subject has no such thing: another endpoint may, and this check says nothing.
    #[error("{0}")]
    Unavailable(String),
    #[error("{0}")]
    Failed(String),
}

pub type Result<T, E = SubjectError> = std::result::Result<T, E>;

/// The answer of a completions surface over HTTP: its status and its whole body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiAnswer {
    pub status: u16,
    pub body: Vec<u8>,
}

/// How a completions surface wants to be asked.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiManner {
    /// Another engine computes there, with roundings of its own.
    pub foreign: bool,
    /// Members of a body that switch off what the surface adds to a plain greedy request.
    pub neutral: Value,
    /// An answer may be told to go on past end-of-text, with `ignore_eos`.
    pub ignore_eos: bool,
}

impl ApiManner {
    /// The manner of this node's own surface.
    pub fn own() -> Self {
        let neutral = json!({ "repetition_penalty": 1.0, "top_k": 0, "min_p": 0.0 });
        Self { foreign: false, neutral, ignore_eos: true }
    }
}

/// The sizes of an engine: its blocks, and how many sequences run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineRoom {
    /// Tokens of a block of the KV cache.
    pub block_tokens: usize,
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// Most sequences that run at the same time.
    pub rows: usize,
}

/// What a subject says of the files of a release that is loaded elsewhere.
fn elsewhere<T>() -> Result<T> {
    Err(SubjectError::Unavailable("the release is loaded elsewhere".into()))
}

/// What was computed of a text, at these positions alone, which ascend.
pub fn only_at(
    positions: &[usize],
    mut scores: Vec<Option<PositionLogprob>>,
) -> Vec<Option<PositionLogprob>> {
    for (at, score) in scores.iter_mut().enumerate() {
        score.take_if(|_| positions.binary_search(&at).is_err());
    }
    scores
}

/// Something that can be qualified: an engine with a loaded release.
pub trait Subject {
    /// File name → hex SHA-256, read from the files that were loaded.
    fn digests(&mut self) -> Result<BTreeMap<String, String>>;
    /// Longest prompt + output, tokens.
    fn context_tokens(&self) -> u32;
    /// Ids that end a generation.
    fn eos_ids(&self) -> Vec<u32>;
    /// Ids that mark up a conversation: the end of a generation, and what the template writes
    /// between the messages. No text of a message may become one of them.
    fn markup_ids(&self) -> Vec<u32> {
        self.eos_ids()
    }
    /// Ids of all control tokens of the vocabulary.
    fn control_ids(&self) -> Vec<u32> {
        self.markup_ids()
    }
    /// Ids that the release's files declare to end an answer, read apart from `eos_ids`.
    fn declared_ends(&mut self) -> Result<Vec<u32>> {
        elsewhere()
    }
    /// Weights of the model; 0 where that is not known.
    fn parameters(&self) -> u64 {
        0
    }
    /// The hyper-parameters that the release's files declare, by their keys there.
    fn hyper_parameters(&mut self) -> Result<BTreeMap<String, Value>> {
        elsewhere()
    }
    /// Every tensor of the release, in the order of its file.
    fn weights(&mut self) -> Result<Vec<WeightStats>> {
        elsewhere()
    }
    /// Compares the kernels with stored references, once with one thread and once with all. `None`
    /// where they do not run on a CPU.
    fn kernels(&mut self) -> Result<Option<Vec<KernelDistance>>> {
        elsewhere()
    }
    /// Token ids of `text`. With `parse_special`, the text of special tokens becomes their ids.
    fn encode(&mut self, text: &str, parse_special: bool) -> Result<Vec<u32>>;
    fn decode(&mut self, ids: &[u32], skip_special: bool) -> Result<String>;
    /// The conversation as the template writes it, with a generation prompt.
    fn render(&mut self, messages: &[ChatTurn]) -> Result<String>;
    /// The conversation as the template writes it, without a generation prompt.
    fn render_history(&mut self, _messages: &[ChatTurn]) -> Result<String> {
        elsewhere()
    }
    fn encode_chat(&mut self, messages: &[ChatTurn]) -> Result<Vec<u32>>;
    /// Ids of the prompt that a request with these messages and tools makes.
    fn encode_request(&mut self, _request: &Value) -> Result<Vec<u32>> {
        elsewhere()
    }
    /// Has the template write a case. `None` where calls have no form that is known here.
    fn write_call(&mut self, _case: &ToolCase) -> Result<Option<WrittenCall>> {
        Ok(None)
    }
    /// Runs all requests at the same time, so that they share steps. Results are in the requests'
    /// order.
    fn generate(&mut self, requests: &[Request]) -> Result<Vec<Generation>>;
    /// For each token of `ids` but the last, the log-probability of the token that follows it in
    /// the text, with the most likely alternatives. `None` where the path computes none.
    fn score(
        &mut self,
        _tenant: u32,
        _ids: &[u32],
        _path: ScorePath,
    ) -> Result<Vec<Option<PositionLogprob>>> {
        elsewhere()
    }
    /// As `score` along a prompt, at these positions alone, in ascending order.
    fn score_at(
        &mut self,
        tenant: u32,
        ids: &[u32],
        positions: &[usize],
    ) -> Result<Vec<Option<PositionLogprob>>> {
        Ok(only_at(positions, self.score(tenant, ids, ScorePath::Prefill)?))
    }
    /// `None` where the engine is elsewhere.
    fn room(&self) -> Option<EngineRoom> {
        None
    }
    /// How often a sequence lost its blocks to another one and had to be computed again.
    fn preemptions(&self) -> u64 {
        0
    }
    /// Blocks of the KV cache that requests hold, once nothing runs any more.
    fn blocks_used(&mut self) -> usize {
        0
    }
    /// Memory of the process that the engine runs in, bytes.
    fn resident_bytes(&self) -> Option<u64> {
        None
    }
    /// Ends the engine and starts it anew from the release's files, with its whole cache or with
    /// this many blocks of it.
    fn restart(&mut self, _blocks: Option<usize>) -> Result<()> {
        elsewhere()
    }
    fn precision(&self) -> Precision {
        Precision::Stored
    }
    /// Whether an answer is the same to the last bit however it is computed.
    fn is_deterministic(&self) -> bool {
        true
    }
    /// What a second implementation says of the same text; `wanted` are ids by position.
    fn witness(&mut self, _ids: &[u32], _wanted: &[Vec<u32>]) -> Result<Witnessed> {
        elsewhere()
    }
    /// Sends a chat completion's body over HTTP; the subject adds the model. Refusals are answers.
    fn call_api(&mut self, body: &Value) -> Result<ApiAnswer>;
    /// Sends all bodies at the same time, as `call_api` each. Answers are in the bodies' order.
    fn call_api_all(&mut self, bodies: &[Value]) -> Result<Vec<ApiAnswer>> {
        bodies.iter().map(|body| self.call_api(body)).collect()
    }
    /// What takes memory now: a part's name and its bytes.
    fn memory(&self) -> Vec<(String, u64)> {
        Vec::new()
    }
    fn api_manner(&self) -> ApiManner {
        ApiManner::own()
    }
}
