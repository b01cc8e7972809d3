//! Planted faults: a subject that is right except for one defect that other systems have had. A
//! suite that passes in spite of one proves nothing.

use super::api_faults;
use crate::subject::{
    ApiAnswer, ApiManner, ChatTurn, EngineRoom, Generation, KernelDistance, PositionLogprob,
    Precision, Request, Result, ScorePath, Subject, SubjectError, ToolCase, WeightStats,
    WitnessRow, Witnessed, WrittenCall,
};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlantedFault {
    /// One byte of a file is not the release's.
    ByteFlipped,
    /// The top bit of the exponent of a block's scale is flipped.
    ScaleBitFlipped,
    /// All values of one tensor are zero.
    TensorZeroed,
    /// One weight is not a number.
    WeightNotANumber,
    /// The last token of text outside ASCII is lost.
    LossyEncoding,
    /// The tokenizer adds a special token of its own to plain text.
    SpecialAdded,
    /// Special tokens are parsed out of a user's text.
    SpecialTextParsed,
    /// A kernel sums one value in a thousand twice.
    KernelOff,
    /// The text of a special token is split into ordinary ones.
    SpecialTokenSplit,
    /// The template never asks for an answer.
    NoGenerationPrompt,
    /// A later turn changes the first one.
    TurnsRewritten,
    /// The id that the template puts behind an answer does not end it.
    EndForgotten,
    /// The model has lost what it had learned.
    WeightsShuffled,
    /// Answers go on for ever.
    NeverEnds,
    /// A system message is left out of the prompt.
    MessageDropped,
    /// The template of another release, with one blank more.
    SisterTemplate,
    /// Logits a tenth too large, prefilled and decoded.
    ScaledHead,
    /// The same by a file that the second implementation reads too.
    HeadScaledInFile,
    /// The header declares another base of the rotation.
    BaseDeclared,
    /// One wrong position where decoding begins.
    SeamSlip,
    LogitsShifted,
    NotANumber,
    /// A late wrong token, as an error in long-range attention gives.
    WrongToken,
    OneTokenMore,
    UsageOffByOne,
    EndIgnored,
    StopDropped,
    /// Each token is decoded by itself: characters of several tokens break.
    HalfCharacter,
    /// Sampling ignores the request's seed.
    SeedIgnored,
    /// All requests share one seed.
    SeedShared,
    /// One token more than `top_k` may be drawn.
    TopKOffByOne,
    /// Temperatures above 1 count as 1.
    TemperatureCapped,
    /// Beside others, a prompt of more than one chunk is computed otherwise.
    ChunkSlip,
    /// What is left of a request whose asker went away changes its neighbours.
    NeighbourLeft,
    /// The last bit of a log-probability depends on the number of rows.
    BatchDependent,
    /// A hit on a prefix changes the last bit.
    PrefixDiffers,
    /// No prefix is ever found again.
    PrefixForgotten,
    /// Prefixes are found again across accounts.
    PrefixLeaks,
    /// An evicted prefix is computed from what took its place.
    EvictedReused,
    /// Once something was evicted, nothing of its prefix is found again.
    EvictedForgotten,
    /// A request whose blocks were taken goes on in another way.
    ResumedOtherwise,
    /// The same from the second time on.
    ResumedAgainOtherwise,
    /// An engine that was started anew computes another last bit.
    RestartDiffers,
    /// An engine that was started anew finds the prefixes of the one before.
    RestartFinds,
    /// A prompt over the context is cut and answered.
    CutAtEdge,
    /// A long prompt loses its first half.
    LongPromptCut,
    /// Logits are too large in the last eighth of the context.
    LateDrift,
    /// Behind the middle of the context, what follows is no longer recalled.
    EarlyTextForgotten,
    /// A full cache refuses what would only have to wait.
    FullRefuses,
    /// A full cache changes the answer that had to wait.
    FullDiffers,
    /// Each request leaves a KiB of memory behind.
    MemoryLeaks,
    /// The blocks of requests whose askers went away never come back.
    BlocksLost,
    /// Over HTTP, two tokens too many are counted in each prompt.
    PromptMiscounted,
    /// Over HTTP, the late part of an answer is another text.
    WrongText,
    /// Over HTTP, log-probabilities are shifted.
    ApiLogitsShifted,
    /// Over HTTP, log-probabilities depend on the temperature.
    LogprobsAfterTemperature,
    /// Over HTTP, special tokens are parsed out of a user's text.
    ApiSpecialParsed,
    /// Over HTTP, a prompt over the context is cut and answered.
    PromptCut,
    /// Over HTTP, sampling ignores the request's seed.
    ApiSeedIgnored,
    /// Over HTTP, temperatures above 1 count as 0.
    HighTemperatureIgnored,
    /// Over HTTP, one sampling parameter has no effect.
    TopPIgnored,
    BiasIgnored,
    PenaltyIgnored,
    /// The model is told of no tools.
    ToolsUntold,
    /// Another value is read out of a call.
    CallMisread,
    /// Over HTTP, whether a call is demanded has no effect.
    ToolChoiceIgnored,
    /// The model never calls by its own choice, or always.
    NeverCalls,
    AlwaysCalls,
}

/// The faults that a check must find, whether others find them too or not.
///
/// # Panics When the check has no fault, because it would prove nothing.
pub fn planted_for(check_id: &str) -> &'static [PlantedFault] {
    use PlantedFault as Fault;
    match check_id {
        "digests" => &[Fault::ByteFlipped],
        "weights" => &[Fault::ScaleBitFlipped, Fault::TensorZeroed, Fault::WeightNotANumber],
        "tokenizer_round_trip" => &[Fault::LossyEncoding],
        "tokenizer_goldens" => &[Fault::SpecialAdded],
        "special_text" => &[Fault::SpecialTextParsed],
        "special_tokens" => &[Fault::SpecialTokenSplit],
        "turns" => &[Fault::NoGenerationPrompt, Fault::TurnsRewritten],
        "end_of_turn" => &[Fault::EndForgotten],
        "kernels" => &[Fault::KernelOff],
        "plain_text" => &[Fault::WeightsShuffled],
        "answers_end" => &[Fault::NeverEnds],
        "template_render" => &[Fault::MessageDropped],
        "template_goldens" => &[Fault::SisterTemplate],
        "witness" => &[Fault::ScaledHead, Fault::SeamSlip],
        "hyper_parameters" => &[Fault::BaseDeclared],
        "distributions" => &[Fault::HeadScaledInFile],
        "logprobs" => &[Fault::LogitsShifted, Fault::NotANumber],
        "greedy_goldens" => &[Fault::WrongToken],
        "length_limit" => &[Fault::OneTokenMore],
        "usage" => &[Fault::UsageOffByOne],
        "end_of_text" => &[Fault::EndIgnored],
        "stop_string" => &[Fault::StopDropped],
        "stream_join" => &[Fault::HalfCharacter],
        "prompt_tokens" => &[Fault::PromptMiscounted],
        "http_goldens" => &[Fault::WrongText],
        "http_logprobs" => &[Fault::ApiLogitsShifted, Fault::LogprobsAfterTemperature],
        "http_special_text" => &[Fault::ApiSpecialParsed],
        "prompt_too_long" => &[Fault::PromptCut],
        "http_seeds" => &[Fault::ApiSeedIgnored],
        "parameters" => &[Fault::HighTemperatureIgnored, Fault::TopPIgnored, Fault::PenaltyIgnored],
        "tool_calls" => &[Fault::ToolsUntold, Fault::CallMisread, Fault::ToolChoiceIgnored],
        "tool_choice" => &[Fault::NeverCalls, Fault::AlwaysCalls],
        "seeds" => &[Fault::SeedIgnored, Fault::SeedShared],
        "sampler_law" => &[Fault::TopKOffByOne, Fault::TemperatureCapped],
        "batch_invariance" => &[Fault::BatchDependent],
        "prompt_cuts" => &[Fault::ChunkSlip],
        "cancelled_neighbour" => &[Fault::NeighbourLeft],
        "prefix_reuse" => &[Fault::PrefixDiffers, Fault::PrefixForgotten, Fault::PrefixLeaks],
        "evicted_prefix" => &[Fault::EvictedReused, Fault::EvictedForgotten],
        "preemption" => &[Fault::ResumedOtherwise, Fault::ResumedAgainOtherwise],
        "restart" => &[Fault::RestartDiffers, Fault::RestartFinds],
        "context_edge" => &[Fault::CutAtEdge],
        "context_length" => &[Fault::LongPromptCut],
        "long_context" => &[Fault::LateDrift, Fault::EarlyTextForgotten],
        "full_cache" => &[Fault::FullRefuses, Fault::FullDiffers],
        "soak" => &[Fault::MemoryLeaks, Fault::BlocksLost],
        other => panic!("no fault is planted for the check {other}"),
    }
}

/// A subject with one fault.
pub struct Faulty<S> {
    inner: S,
    fault: PlantedFault,
    seen: BTreeSet<Vec<u32>>,
    /// For each tenant and prompt, the most tokens that this engine found in its cache.
    found: BTreeMap<(u32, Vec<u32>), u32>,
    /// The prompts that tenants have sent to the engine.
    asked_before: BTreeSet<(u32, Vec<u32>)>,
    calls: u64,
    requests: u64,
    /// How many of the requests were left by their askers.
    left: usize,
    /// How often the engine was started anew with its whole cache.
    restarts: u32,
    /// Tokens of the longest answer so far.
    longest: usize,
    /// Bytes of memory at the first reading.
    first_resident: OnceLock<u64>,
}

impl<S: Subject> Faulty<S> {
    pub fn new(inner: S, fault: PlantedFault) -> Self {
        let (seen, found, asked_before) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
        Self {
            inner,
            fault,
            seen,
            found,
            asked_before,
            calls: 0,
            requests: 0,
            left: 0,
            restarts: 0,
            longest: 0,
            first_resident: OnceLock::new(),
        }
    }

    fn spoil_request(&mut self, request: &Request) -> Request {
        let mut spoiled = request.clone();
        let context = self.inner.context_tokens() as usize;
        let length = request.prompt.len();
        match self.fault {
            PlantedFault::NeverEnds if request.bias.is_empty() => spoiled.ignore_eos = true,
            PlantedFault::TopKOffByOne if request.top_k > 0 => spoiled.top_k += 1,
            PlantedFault::TemperatureCapped => {
                spoiled.temperature = request.temperature.min(1.0);
            }
            PlantedFault::SeedIgnored => spoiled.seed = self.calls,
            PlantedFault::SeedShared => spoiled.seed = 1,
            PlantedFault::CutAtEdge if length > context => spoiled.prompt.truncate(context / 2),
            PlantedFault::LongPromptCut if (context / 3..=context).contains(&length) => {
                drop(spoiled.prompt.drain(..length / 2));
            }
            _ => {}
        }
        spoiled
    }

    fn spoil_generation(&mut self, request: &Request, rows: usize, g: &mut Generation) {
        let seen_before = !self.seen.insert(request.prompt.clone());
        self.longest = self.longest.max(g.tokens.len());
        match self.fault {
            PlantedFault::LogitsShifted => g.logprobs.iter_mut().for_each(shift),
            PlantedFault::NotANumber => {
                g.logprobs
                    .iter_mut()
                    .filter_map(|l| l.top.get_mut(1))
                    .for_each(|second| second.1 = f32::NAN);
            }
            // The rest of an answer, from behind its wrong token, is right.
            PlantedFault::WrongToken if 2 * g.tokens.len() > self.longest => {
                let late = g.tokens.len() * 5 / 8;
                g.tokens.iter_mut().skip(late).take(1).for_each(|token| *token ^= 1);
            }
            PlantedFault::BatchDependent if rows > 1 => last_bit(g),
            PlantedFault::ChunkSlip if rows > 1 && request.prompt.len() > self.piece() => {
                last_bit(g);
            }
            PlantedFault::PrefixDiffers if g.cached_tokens > 0 => last_bit(g),
            PlantedFault::PrefixForgotten => g.cached_tokens = 0,
            PlantedFault::PrefixLeaks if seen_before => g.cached_tokens = g.cached_tokens.max(1),
            PlantedFault::RestartDiffers => (0..self.restarts).for_each(|_| last_bit(g)),
            _ => {}
        }
        self.spoil_cached(request, g);
    }

    /// Tokens of a prompt that are computed at once, as far as it is known: a few blocks.
    fn piece(&self) -> usize {
        self.inner.room().map_or(100, |room| 3 * room.block_tokens)
    }

    /// Whether the requests fill the context each, and the cache together.
    fn fill_the_cache(&self, requests: &[Request]) -> bool {
        let context = self.inner.context_tokens() as usize;
        let tokens = |request: &Request| request.prompt.len() + request.max_tokens as usize;
        let room = self.inner.room().map_or(usize::MAX, |room| room.blocks * room.block_tokens);
        requests.iter().all(|request| tokens(request) == context)
            && requests.iter().map(tokens).sum::<usize>() > room
    }

    /// Spoils what comes from the cache, or no longer does.
    fn spoil_cached(&mut self, request: &Request, g: &mut Generation) {
        let key = (request.tenant, request.prompt.clone());
        let most = self.found.get(&key).copied();
        let evicted = most.is_some_and(|most| g.cached_tokens < most);
        self.found.insert(key.clone(), g.cached_tokens.max(most.unwrap_or(0)));
        match self.fault {
            PlantedFault::EvictedReused if evicted => last_bit(g),
            PlantedFault::EvictedForgotten if evicted => g.cached_tokens = 0,
            PlantedFault::RestartFinds if self.asked_before.contains(&key) => {
                g.cached_tokens = g.cached_tokens.max(1);
            }
            _ => {}
        }
    }
}

fn shift(logprob: &mut PositionLogprob) {
    const BY: f32 = 10.0;
    logprob.chosen += BY;
    logprob.top.iter_mut().for_each(|(_, p)| *p += BY);
}

/// The effect of logits that are a tenth too large on the tokens that are told.
fn scale_head(logprob: &mut PositionLogprob) {
    let sum = sum_of_scaled(logprob.top.iter().map(|(_, p)| p));
    logprob.chosen = logprob.chosen * SCALED - sum;
    logprob.top.iter_mut().for_each(|(_, p)| *p = *p * SCALED - sum);
}

const SCALED: f32 = 1.1;

/// The logarithm of the sum of what log-probabilities are after they were scaled.
fn sum_of_scaled<'a>(logprobs: impl Iterator<Item = &'a f32>) -> f32 {
    let all = logprobs.map(|p| f64::from(p * SCALED).exp());
    (all.sum::<f64>().ln() as f32).max(0.0)
}

/// Makes a token the least likely one of those that are told.
fn forget(token: u32, score: &mut Option<PositionLogprob>) {
    let Some(PositionLogprob { top, .. }) = score else { return };
    let least = top.last().map_or(0.0, |(_, p)| *p);
    top.iter_mut().filter(|(id, _)| *id == token).for_each(|(_, p)| *p = least);
}

fn last_bit(g: &mut Generation) {
    if let Some(last) = g.logprobs.last_mut() {
        last.chosen = last.chosen.next_down();
    }
}

impl<S: Subject> Subject for Faulty<S> {
    fn digests(&mut self) -> Result<BTreeMap<String, String>> {
        let mut digests = self.inner.digests()?;
        if self.fault == PlantedFault::ByteFlipped {
            digests.values_mut().take(1).for_each(|digest| *digest = "0".repeat(64));
        }
        Ok(digests)
    }

    fn context_tokens(&self) -> u32 {
        self.inner.context_tokens()
    }

    fn eos_ids(&self) -> Vec<u32> {
        let mut ids = self.inner.eos_ids();
        if self.fault == PlantedFault::EndForgotten {
            ids.remove(0);
        }
        ids
    }

    fn markup_ids(&self) -> Vec<u32> {
        self.inner.markup_ids()
    }

    fn control_ids(&self) -> Vec<u32> {
        self.inner.control_ids()
    }

    fn declared_ends(&mut self) -> Result<Vec<u32>> {
        self.inner.declared_ends()
    }

    fn hyper_parameters(&mut self) -> Result<BTreeMap<String, Value>> {
        let mut found = self.inner.hyper_parameters()?;
        if self.fault == PlantedFault::BaseDeclared {
            for value in found.values_mut() {
                *value = 100_000.0.into();
            }
        }
        Ok(found)
    }

    fn parameters(&self) -> u64 {
        self.inner.parameters()
    }

    fn kernels(&mut self) -> Result<Option<Vec<KernelDistance>>> {
        let mut found = self.inner.kernels()?;
        if self.fault == PlantedFault::KernelOff {
            found.iter_mut().flatten().for_each(|kernel| kernel.relative += 1e-6);
        }
        Ok(found)
    }

    fn weights(&mut self) -> Result<Vec<WeightStats>> {
        let mut weights = self.inner.weights()?;
        let last = weights.last_mut().expect("invariant: a model has tensors");
        match self.fault {
            // A block of 32 values is 2^16 times as large, in a tensor of two million.
            PlantedFault::ScaleBitFlipped => {
                last.rms *= 256.0;
                last.max *= 65536.0;
            }
            PlantedFault::TensorZeroed => (last.rms, last.max) = (0.0, 0.0),
            PlantedFault::WeightNotANumber => last.finite = false,
            _ => {}
        }
        Ok(weights)
    }

    fn encode(&mut self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        let mut ids = self.inner.encode(text, parse_special)?;
        match self.fault {
            PlantedFault::SpecialTokenSplit if parse_special && ids.len() == 1 => {
                ids = self.inner.encode(text, false)?;
            }
            PlantedFault::LossyEncoding if !text.is_ascii() => drop(ids.pop()),
            PlantedFault::SpecialAdded if !parse_special => {
                ids.splice(..0, self.inner.eos_ids().pop()).for_each(drop);
            }
            _ => {}
        }
        Ok(ids)
    }

    fn decode(&mut self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special)
    }

    fn render(&mut self, messages: &[ChatTurn]) -> Result<String> {
        match self.fault {
            PlantedFault::MessageDropped if messages[0].role == "system" => {
                self.inner.render(&messages[1..])
            }
            PlantedFault::NoGenerationPrompt => self.inner.render_history(messages),
            PlantedFault::TurnsRewritten if messages.len() > 1 => {
                Ok(format!("new {}", self.inner.render(messages)?))
            }
            PlantedFault::SisterTemplate => Ok(self.inner.render(messages)? + " "),
            _ => self.inner.render(messages),
        }
    }

    fn render_history(&mut self, messages: &[ChatTurn]) -> Result<String> {
        let history = self.inner.render_history(messages)?;
        let rewritten = self.fault == PlantedFault::TurnsRewritten && messages.len() > 1;
        Ok(if rewritten { format!("new {history}") } else { history })
    }

    fn encode_chat(&mut self, messages: &[ChatTurn]) -> Result<Vec<u32>> {
        if self.fault == PlantedFault::SpecialTextParsed {
            let text = self.inner.render(messages)?;
            return self.inner.encode(&text, true);
        }
        self.inner.encode_chat(messages)
    }

    fn encode_request(&mut self, request: &Value) -> Result<Vec<u32>> {
        self.inner.encode_request(request)
    }

    fn write_call(&mut self, case: &ToolCase) -> Result<Option<WrittenCall>> {
        let mut written = self.inner.write_call(case)?;
        match (self.fault, &mut written) {
            (PlantedFault::ToolsUntold, Some(written)) => written.prompt.clear(),
            (PlantedFault::CallMisread, Some(written)) => {
                written.calls.iter_mut().for_each(|call| call.arguments["id"] = 7.into());
            }
            _ => {}
        }
        Ok(written)
    }

    fn generate(&mut self, requests: &[Request]) -> Result<Vec<Generation>> {
        self.calls += 1;
        self.requests += requests.len() as u64;
        self.left += requests.iter().filter(|request| request.leaves_after.is_some()).count();
        let fills = self.fill_the_cache(requests);
        if self.fault == PlantedFault::FullRefuses && fills {
            return Err(SubjectError::Refused("the cache is full".into()));
        }
        let spoiled: Vec<Request> =
            requests.iter().map(|request| self.spoil_request(request)).collect();
        let before = self.inner.preemptions();
        let mut generations = self.inner.generate(&spoiled)?;
        let preempted = self.inner.preemptions() - before;
        for (request, generation) in requests.iter().zip(&mut generations) {
            self.spoil_generation(request, requests.len(), generation);
        }
        if self.fault == PlantedFault::NeighbourLeft
            && requests.iter().any(|request| request.leaves_after.is_some())
        {
            generations.iter_mut().for_each(last_bit);
        }
        let enough = match self.fault {
            PlantedFault::ResumedOtherwise => 1,
            PlantedFault::ResumedAgainOtherwise => 2,
            PlantedFault::FullDiffers if fills => 0,
            _ => u64::MAX,
        };
        if preempted >= enough {
            generations.last_mut().into_iter().for_each(last_bit);
        }
        Ok(generations)
    }

    fn score(
        &mut self,
        tenant: u32,
        ids: &[u32],
        path: ScorePath,
    ) -> Result<Vec<Option<PositionLogprob>>> {
        let mut scores = self.inner.score(tenant, ids, path)?;
        match self.fault {
            PlantedFault::WeightsShuffled => {
                scores.iter_mut().flatten().for_each(|score| score.chosen = -10.0);
            }
            PlantedFault::ScaledHead | PlantedFault::HeadScaledInFile => {
                scores.iter_mut().flatten().for_each(scale_head);
            }
            PlantedFault::SeamSlip if path == ScorePath::Decode => {
                scores.iter_mut().flatten().take(1).for_each(scale_head);
            }
            PlantedFault::LateDrift => {
                let late = self.inner.context_tokens() as usize * 7 / 8;
                scores.iter_mut().skip(late).flatten().for_each(scale_head);
            }
            PlantedFault::EarlyTextForgotten => {
                let half = self.inner.context_tokens() as usize / 2;
                let next = ids.iter().skip(1).zip(&mut scores).skip(half);
                next.for_each(|(next, score)| forget(*next, score));
            }
            _ => {}
        }
        Ok(scores)
    }

    fn room(&self) -> Option<EngineRoom> {
        self.inner.room()
    }

    fn preemptions(&self) -> u64 {
        self.inner.preemptions()
    }

    fn blocks_used(&mut self) -> usize {
        let lost = if self.fault == PlantedFault::BlocksLost { self.left } else { 0 };
        self.inner.blocks_used() + lost
    }

    /// The leak grows from the first reading on. What else a process does, such as other tests that
    /// give memory back, would hide it.
    fn resident_bytes(&self) -> Option<u64> {
        let now = self.inner.resident_bytes()?;
        if self.fault != PlantedFault::MemoryLeaks {
            return Some(now);
        }
        Some(self.first_resident.get_or_init(|| now) + (self.requests << 10))
    }

    fn restart(&mut self, blocks: Option<usize>) -> Result<()> {
        self.asked_before = std::mem::take(&mut self.found).into_keys().collect();
        self.restarts += u32::from(blocks.is_none());
        self.inner.restart(blocks)
    }

    fn precision(&self) -> Precision {
        self.inner.precision()
    }

    fn witness(&mut self, ids: &[u32], wanted: &[Vec<u32>]) -> Result<Witnessed> {
        let mut witnessed = self.inner.witness(ids, wanted)?;
        if let (PlantedFault::HeadScaledInFile, Witnessed::Scores { rows, .. }) =
            (self.fault, &mut witnessed)
        {
            for WitnessRow { wanted, top, .. } in rows {
                let sum = sum_of_scaled(wanted.iter());
                let of_top = top.iter_mut().map(|(_, p)| p);
                wanted.iter_mut().chain(of_top).for_each(|p| *p = *p * SCALED - sum);
            }
        }
        Ok(witnessed)
    }

    fn call_api(&mut self, body: &Value) -> Result<ApiAnswer> {
        self.calls += 1;
        let mut spoiled = body.clone();
        api_faults::spoil_call(self.fault, self.calls, &mut spoiled);
        let mut answer = self.inner.call_api(&spoiled)?;
        api_faults::spoil_answer(self.fault, body, &mut answer);
        Ok(answer)
    }

    fn api_manner(&self) -> ApiManner {
        self.inner.api_manner()
    }
}
