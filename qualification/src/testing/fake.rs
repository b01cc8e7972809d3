//! A subject that needs no model: bytes are tokens, and the next token is a hash of those before
//! it.

use super::fake_api::Dialect;
use crate::checks::due_calls;
use crate::goldens::{
    Case, Document, DocumentRow, Goldens, GoldensOrigin, TemplateCase, TokenizerCase,
    ToolConversation,
};
use crate::subject::{
    ApiAnswer, ApiManner, ChatTurn, EngineRoom, Finish, Generation, KernelDistance,
    PositionLogprob, Precision, Request, Result, ScorePath, Subject, SubjectError, TOP_LOGPROBS,
    ToolCase, WeightStats, WitnessRow, Witnessed, WrittenCall,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

const START: u32 = 256;
const END: u32 = 257;
const END_OF_TEXT: u32 = 258;
pub(super) const VOCABULARY: u32 = 259;
const SPECIALS: [(u32, &str); 3] =
    [(START, "<|start|>"), (END, "<|end|>"), (END_OF_TEXT, "<|endoftext|>")];
const ROOM: EngineRoom = EngineRoom { block_tokens: 16, blocks: 512, rows: 64 };

pub struct Fake {
    room: EngineRoom,
    /// Hashes of the beginnings that are in the cache, one for each block, the oldest first.
    kept: Vec<u64>,
    preemptions: u64,
    /// How it answers over HTTP.
    dialect: Dialect,
}

impl Default for Fake {
    fn default() -> Self {
        Self { room: ROOM, kept: Vec::new(), preemptions: 0, dialect: Dialect::default() }
    }
}

pub fn files() -> BTreeMap<String, String> {
    BTreeMap::from([("weights.gguf".to_owned(), "a".repeat(64))])
}

/// The outputs of a reference implementation: those of the fake itself without a fault.
pub fn goldens() -> Goldens {
    let mut fake = Fake::default();
    // Its answer does not end by itself, so that all of it is compared.
    let case = |number: u32| {
        let messages = vec![ChatTurn::new("user", &format!("hello {number}"))];
        let prompt_ids = fake.encode_chat(&messages).unwrap();
        let generation = fake.generate(&[Request::greedy(0, &prompt_ids, 64)]).unwrap().remove(0);
        let goes_on = !generation.tokens.contains(&END);
        goes_on.then_some((messages, prompt_ids, generation))
    };
    let (messages, prompt_ids, generation) = (0..).find_map(case).unwrap();
    let top2 = generation.tokens.iter().map(|token| [(*token, 1.0), (0, 0.0)]).collect();
    let case = Case {
        id: "hello".into(),
        messages: messages.clone(),
        prompt_ids,
        greedy_ids: generation.tokens,
        top2,
    };
    let text = "about";
    Goldens {
        origin: GoldensOrigin { release: "fake".into(), ..GoldensOrigin::default() },
        weights_sha256: "a".repeat(64),
        parameters: fake.hyper_parameters().unwrap(),
        ends: fake.eos_ids(),
        documents: vec![document(&fake.encode(DOCUMENT, false).unwrap())],
        cases: vec![case],
        tokenizer: vec![TokenizerCase {
            text: text.into(),
            ids: fake.encode(text, false).unwrap(),
            special_ids: None,
        }],
        templates: vec![TemplateCase {
            prompt: fake.render(&messages).unwrap(),
            messages,
            add_generation_prompt: true,
        }],
        tool_conversations: vec![ToolConversation {
            id: "asked".into(),
            prompt: json!({ "tools": [1] }).to_string(),
            request: json!({ "tools": [1] }),
        }],
    }
}

const DOCUMENT: &str = "The reference's distributions are known at each position of this text.";

fn document(ids: &[u32]) -> Document {
    let row = |position: usize| {
        let mut top = logprobs(&logits(&ids[..=position], &[]));
        top.truncate(64);
        DocumentRow { position, top }
    };
    let rows = (0..ids.len() - 1).map(row).collect();
    Document { domain: "prose".into(), ids: ids.to_vec(), rows }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

fn unit(value: impl Hash) -> f64 {
    (hash(value) >> 11) as f64 / (1u64 << 53) as f64
}

/// Letters and blanks are likely, everything else is not; after some of the beginnings, an answer
/// ends.
fn logits(before: &[u32], bias: &[(u32, f32)]) -> Vec<f32> {
    const ENDS: f64 = 1.0 / 16.0;
    let tail = &before[before.len().saturating_sub(24)..];
    let likely = |id: u32| (97..123).contains(&id) || id == 32;
    let mixed = hash(tail);
    let mut logits: Vec<f32> = (0..VOCABULARY)
        .map(|id| unit((mixed, id)) as f32 * 6.0 - if likely(id) { 0.0 } else { 12.0 })
        .collect();
    if unit((tail, "end")) < ENDS {
        logits[END as usize] += 24.0;
    }
    for (id, by) in bias {
        logits[*id as usize] += by;
    }
    logits
}

fn choose(logits: &[f32], request: &Request, position: usize) -> u32 {
    let gumbel = |id: usize| match request.temperature {
        0.0 => 0.0,
        t => -f64::from(t) * (-unit((request.seed, position, id)).max(1e-300).ln()).ln(),
    };
    let score = |id: usize| f64::from(logits[id]) + gumbel(id);
    let left = truncated(logits, request);
    left.into_iter().max_by(|&a, &b| score(a).total_cmp(&score(b))).unwrap() as u32
}

/// The ids that top-k, top-p and min-p leave, most likely first.
fn truncated(logits: &[f32], request: &Request) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    if request.temperature <= 0.0 {
        return ids;
    }
    ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let scaled = |id: usize| f64::from((logits[id] - logits[ids[0]]) / request.temperature).exp();
    let weights: Vec<f64> = ids.iter().map(|id| scaled(*id)).collect();
    let most = if request.top_k == 0 { ids.len() } else { request.top_k as usize };
    let whole: f64 = weights.iter().take(most).sum();
    let mut before = 0.0;
    let kept = weights.iter().take(most).take_while(|weight| {
        let in_time = before < whole * f64::from(request.top_p);
        before += **weight;
        in_time && **weight >= f64::from(request.min_p)
    });
    let kept = kept.count();
    ids.truncate(kept.max(1));
    ids
}

/// Log-probabilities of the whole vocabulary, most likely first.
fn logprobs(logits: &[f32]) -> Vec<(u32, f32)> {
    let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    let of = |(id, l): (usize, &f32)| (id as u32, (f64::from(*l) - sum.ln()) as f32);
    let mut all: Vec<(u32, f32)> = logits.iter().enumerate().map(of).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

fn logprob(logits: &[f32], chosen: u32) -> PositionLogprob {
    let mut top = logprobs(logits);
    let own = top.iter().find(|(id, _)| *id == chosen).map_or(f32::NEG_INFINITY, |(_, p)| *p);
    top.truncate(TOP_LOGPROBS.into());
    PositionLogprob { chosen: own, top }
}

/// Returns whole characters as they become certain; `pending` keeps the rest.
pub(super) fn certain(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    while let Err(error) = std::str::from_utf8(pending) {
        let (valid, invalid) = (error.valid_up_to(), error.error_len());
        text.extend(std::str::from_utf8(&pending[..valid]));
        pending.drain(..valid + invalid.unwrap_or(0));
        if invalid.is_none() {
            return text;
        }
        text.push('\u{fffd}');
    }
    text + &String::from_utf8(std::mem::take(pending)).unwrap()
}

pub(super) fn token_bytes(id: u32, skip_special: bool) -> Vec<u8> {
    let special = SPECIALS.iter().find(|(special, _)| *special == id);
    match special {
        Some(_) if skip_special => Vec::new(),
        Some((_, text)) => text.as_bytes().to_vec(),
        None => vec![id as u8],
    }
}

impl Fake {
    pub(crate) fn speaking(dialect: Dialect) -> Self {
        Self { dialect, ..Self::default() }
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Tokens that are found in the cache. Afterwards the request's own are in it, and what was
    /// there longest made room for them.
    fn cached(&mut self, request: &Request) -> u32 {
        let EngineRoom { block_tokens, blocks, .. } = self.room;
        let ends = (1..=request.prompt.len().saturating_sub(1) / block_tokens).rev();
        let own = ends.map(|block| hash((request.tenant, &request.prompt[..block * block_tokens])));
        let own: Vec<u64> = own.collect();
        let found = own.iter().rev().take_while(|one| self.kept.contains(one)).count();
        self.kept.retain(|one| !own.contains(one));
        let needed = (request.prompt.len() + request.max_tokens as usize).div_ceil(block_tokens);
        let over = (self.kept.len() + needed).saturating_sub(blocks);
        self.kept.drain(..over.min(self.kept.len()));
        self.kept.extend(own);
        (found * block_tokens) as u32
    }

    /// How often the requests take blocks from each other: all of them grow by a token at a time,
    /// and the last one waits when there is no room.
    fn count_preemptions(&mut self, requests: &[Request]) {
        let blocks = |tokens: usize| tokens.div_ceil(self.room.block_tokens);
        let size = |request: &Request| {
            let length = request.prompt.len();
            (length, length + request.max_tokens as usize)
        };
        let (mut waiting, mut running): (Vec<_>, Vec<(usize, usize)>) =
            (requests.iter().rev().map(size).collect(), Vec::new());
        while !(waiting.is_empty() && running.is_empty()) {
            let used = |all: &[(usize, usize)]| all.iter().map(|one| blocks(one.0)).sum::<usize>();
            while waiting.last().is_some_and(|next| {
                used(&running) + running.len() + blocks(next.0) <= self.room.blocks
            }) {
                running.extend(waiting.pop());
            }
            for one in &mut running {
                one.0 += 1;
            }
            running.retain(|one| one.0 < one.1);
            while running.len() > 1 && used(&running) > self.room.blocks {
                waiting.extend(running.pop());
                self.preemptions += 1;
            }
            if running.is_empty() {
                waiting.pop();
            }
        }
    }

    fn check_prompt(&self, ids: &[u32]) -> Result<()> {
        if ids.len() + 1 > self.context_tokens() as usize {
            return Err(SubjectError::Refused("the prompt is longer than the context".into()));
        }
        Ok(())
    }

    pub(super) fn one(&mut self, request: &Request) -> Result<Generation> {
        self.check_prompt(&request.prompt)?;
        let cached_tokens = self.cached(request);
        let (mut sequence, mut pending) = (request.prompt.clone(), Vec::new());
        let (mut deltas, mut logprobs, mut finish) = (Vec::new(), Vec::new(), Finish::Length);
        for _ in 0..request.leaves_after.unwrap_or(u32::MAX).min(request.max_tokens) {
            let logits = logits(&sequence, &request.bias);
            let token = choose(&logits, request, sequence.len());
            sequence.push(token);
            logprobs.push(logprob(&logits, token));
            pending.extend(token_bytes(token, true));
            deltas.push(certain(&mut pending));
            let text = deltas.concat();
            if let Some(at) = request.stop.iter().filter_map(|stop| text.find(stop.as_str())).min()
            {
                deltas = vec![text[..at].to_owned()];
                finish = Finish::Stop;
                break;
            }
            if !request.ignore_eos && self.eos_ids().contains(&token) {
                finish = Finish::Stop;
                break;
            }
        }
        deltas.push(String::from_utf8_lossy(&pending).into_owned());
        let tokens = sequence.split_off(request.prompt.len());
        let (prompt_tokens, completion_tokens) = (request.prompt.len() as u32, tokens.len() as u32);
        Ok(Generation {
            tokens,
            logprobs,
            deltas,
            finish,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
        })
    }
}

impl Subject for Fake {
    fn digests(&mut self) -> Result<BTreeMap<String, String>> {
        Ok(files())
    }

    fn context_tokens(&self) -> u32 {
        1024
    }

    fn eos_ids(&self) -> Vec<u32> {
        vec![END, END_OF_TEXT]
    }

    fn control_ids(&self) -> Vec<u32> {
        SPECIALS.map(|(id, _)| id).to_vec()
    }

    fn declared_ends(&mut self) -> Result<Vec<u32>> {
        Ok(vec![END_OF_TEXT])
    }

    fn hyper_parameters(&mut self) -> Result<BTreeMap<String, Value>> {
        Ok(BTreeMap::from([("fake.rope.freq_base".to_owned(), 10_000.0.into())]))
    }

    fn parameters(&self) -> u64 {
        100_000_000
    }

    fn kernels(&mut self) -> Result<Option<Vec<KernelDistance>>> {
        let exact =
            KernelDistance { name: "fake".into(), most: 0.0, relative: 0.0, rounded: false };
        Ok(Some(vec![exact]))
    }

    fn weights(&mut self) -> Result<Vec<WeightStats>> {
        let tensor = |layer: u8| WeightStats {
            name: format!("blk.{layer}.attn_q.weight"),
            finite: true,
            rms: 0.1 + 0.01 * f64::from(layer),
            max: 1.0 + 0.1 * f32::from(layer),
        };
        Ok((0..6).map(tensor).collect())
    }

    fn encode(&mut self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        let (mut ids, mut rest) = (Vec::new(), text);
        while let Some(character) = rest.chars().next() {
            let special =
                SPECIALS.iter().find(|(_, special)| parse_special && rest.starts_with(special));
            let (length, new) = match special {
                Some((id, special)) => (special.len(), vec![*id]),
                None => {
                    (character.len_utf8(), character.to_string().bytes().map(u32::from).collect())
                }
            };
            ids.extend(new);
            rest = &rest[length..];
        }
        Ok(ids)
    }

    fn decode(&mut self, ids: &[u32], skip_special: bool) -> Result<String> {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| token_bytes(*id, skip_special)).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn render(&mut self, messages: &[ChatTurn]) -> Result<String> {
        Ok(self.render_history(messages)? + "<|start|>assistant\n")
    }

    fn render_history(&mut self, messages: &[ChatTurn]) -> Result<String> {
        let turns = messages.iter().map(|m| format!("<|start|>{}\n{}<|end|>\n", m.role, m.content));
        Ok(turns.collect())
    }

    fn encode_chat(&mut self, messages: &[ChatTurn]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for message in messages {
            ids.push(START);
            ids.extend(self.encode(&format!("{}\n{}", message.role, message.content), false)?);
            ids.push(END);
            ids.extend(self.encode("\n", false)?);
        }
        ids.push(START);
        ids.extend(self.encode("assistant\n", false)?);
        Ok(ids)
    }

    fn write_call(&mut self, case: &ToolCase) -> Result<Option<WrittenCall>> {
        let prompt = Value::from(case.tools.clone()).to_string();
        Ok(Some(WrittenCall { prompt, calls: vec![case.call.clone()] }))
    }

    fn encode_request(&mut self, request: &Value) -> Result<Vec<u32>> {
        // A byte is a token here, and the fake reads no tools in what it knows by heart.
        let read = if due_calls(request).is_some() { &request["messages"] } else { request };
        self.encode(&read.to_string(), true)
    }

    fn generate(&mut self, requests: &[Request]) -> Result<Vec<Generation>> {
        self.count_preemptions(requests);
        requests.iter().map(|request| self.one(request)).collect()
    }

    fn room(&self) -> Option<EngineRoom> {
        Some(self.room)
    }

    fn preemptions(&self) -> u64 {
        self.preemptions
    }

    fn resident_bytes(&self) -> Option<u64> {
        Some(100 << 20)
    }

    fn restart(&mut self, blocks: Option<usize>) -> Result<()> {
        self.room.blocks = blocks.unwrap_or(ROOM.blocks);
        self.kept.clear();
        Ok(())
    }

    fn score(
        &mut self,
        _tenant: u32,
        ids: &[u32],
        _path: ScorePath,
    ) -> Result<Vec<Option<PositionLogprob>>> {
        self.check_prompt(ids)?;
        // The fake knows every text by heart: each next token is likely.
        let score = |(at, pair): (usize, &[u32])| {
            let told = logprob(&logits(&ids[..=at], &[]), pair[1]);
            Some(PositionLogprob { chosen: told.chosen.max(-1.0), ..told })
        };
        Ok(ids.windows(2).enumerate().map(score).collect())
    }

    fn precision(&self) -> Precision {
        Precision::Exact
    }

    /// The fake itself, summed in another order.
    fn witness(&mut self, ids: &[u32], wanted: &[Vec<u32>]) -> Result<Witnessed> {
        let row = |(position, wanted): (usize, &Vec<u32>)| {
            let logits = logits(&ids[..=position], &[]);
            let sum: f64 = logits.iter().rev().map(|l| f64::from(*l).exp()).sum();
            let logprob = |id: u32| (f64::from(logits[id as usize]) - sum.ln()) as f32;
            let mut order: Vec<u32> = (0..VOCABULARY).collect();
            order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            let top = [0, 1].map(|at| (order[at], logprob(order[at])));
            WitnessRow { position, top, wanted: wanted.iter().map(|id| logprob(*id)).collect() }
        };
        let rows = wanted.iter().enumerate().map(row).collect();
        Ok(Witnessed::Scores { by: "the fake in another order".into(), rows })
    }

    fn call_api(&mut self, body: &Value) -> Result<ApiAnswer> {
        self.answer(body)
    }

    fn api_manner(&self) -> ApiManner {
        self.dialect.manner()
    }
}
