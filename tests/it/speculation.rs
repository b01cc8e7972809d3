//! What drafts gain and cost with a real model: answers that repeat their prompt, and prose.

use super::release::{fetch, run_tokens};
use cresset_base::AccountId;
use cresset_engine::{
    EngineError, EngineHandle, EngineOptions, GenerateRequest, ModelRunner, RowResult, RowSampling,
    Runner, SamplingParams,
};
use cresset_models::{ForwardBatch, ModelOptions, ModelSource};
use cresset_node::config::Config;
use cresset_text::{ChatMessage, TextModel};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const QWEN: &str = "qwen2.5-coder-1.5b-instruct";
const CONTEXT: usize = 4096;

#[derive(serde::Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    kind: String,
    text: Option<String>,
    ask: String,
}

impl Case {
    fn prompt(&self, model: &TextModel) -> Arc<Vec<u32>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/speculation/texts");
        let text = self.text.as_ref().map(|name| {
            std::fs::read_to_string(folder.join(format!("{name}.txt"))).expect("a text of its name")
        });
        let content = text.map_or(self.ask.clone(), |text| format!("{text}\n\n{}", self.ask));
        let message =
            ChatMessage { role: "user".into(), content: Some(content), ..ChatMessage::default() };
        Arc::new(model.encode_chat(&[message]).unwrap())
    }
}

/// The same weights in the same memory serve both engines, which take turns and find no prefix.
#[derive(Clone)]
struct SharedRunner(Arc<Mutex<ModelRunner>>);

impl SharedRunner {
    fn inner(&self) -> MutexGuard<'_, ModelRunner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Runner for SharedRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        self.inner().launch(batch, rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.inner().collect()
    }
}

/// Two engines around one model: without drafts, and with as many as a node has.
fn engines(file: PathBuf) -> [EngineHandle; 2] {
    let options = ModelOptions {
        threads: std::thread::available_parallelism().map_or(1, usize::from),
        dequantise: false,
        kv_bytes: 256 << 20,
        block_size: 16,
        max_batched_tokens: 512,
        max_context: Some(CONTEXT),
        ..ModelOptions::default()
    };
    let (runner, info) = ModelRunner::load(&ModelSource::gguf(file), &options).unwrap();
    let runner = SharedRunner(Arc::new(Mutex::new(runner)));
    let usual = Config::default().engine.speculative_tokens;
    [0, usual].map(|speculative_tokens| {
        let options = EngineOptions {
            max_batched_tokens: 512,
            background_tokens: 16,
            max_rows: 64,
            max_waiting: 4,
            block_size: 16,
            num_blocks: info.num_blocks,
            cache: info.cache.clone(),
            max_context: CONTEXT,
            speculative_tokens,
        };
        EngineHandle::start(Box::new(runner.clone()), options)
    })
}

/// The answer, greedy, of at most so many tokens, and the time from its first token to its last.
fn answer(
    engine: &EngineHandle,
    model: &TextModel,
    prompt: &Arc<Vec<u32>>,
    max_tokens: u32,
) -> (Vec<u32>, Duration) {
    let request = GenerateRequest {
        account: AccountId::generate(),
        application: None,
        priority: 0,
        background: false,
        prompt: Arc::new(prompt.to_vec()),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens,
        min_tokens: 0,
        eos_ids: model.eos_ids.clone().into(),
        grammar: None,
        deadline: None,
    };
    let mut first = None;
    let tokens = run_tokens(engine.submit(request).unwrap().1, || {
        first.get_or_insert_with(Instant::now);
    });
    (tokens, first.map_or(Duration::ZERO, |first| first.elapsed()))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs each case with and without drafts, in turns that change who begins. `DRAFT_CASES=N` runs
/// every N-th case only, `DRAFT_KIND` those of one kind, and `DRAFT_TOKENS` sets the longest answer
/// (300).
#[test]
#[ignore = "a measurement with 1.1 GB of weights, which are fetched once"]
#[expect(clippy::disallowed_methods, reason = "a measurement is told its size")]
fn drafts_of_code_retrieval_and_prose() {
    let number = |name: &str, usual: u32| {
        std::env::var(name).map_or(usual, |text| text.parse().expect("a number"))
    };
    let (every, most) = (number("DRAFT_CASES", 1), number("DRAFT_TOKENS", 300));
    let file = fetch(QWEN);
    let model = TextModel::load(&ModelSource::gguf(file.clone())).unwrap();
    let Cases { cases } = toml::from_str(include_str!("speculation/cases.toml")).unwrap();
    let engines = engines(file);
    let mut ratios = BTreeMap::<String, Vec<f64>>::new();
    let wanted = |case: &Case| std::env::var("DRAFT_KIND").map_or(true, |kind| kind == case.kind);
    for (at, case) in cases.iter().filter(|case| wanted(case)).step_by(every as usize).enumerate() {
        let prompt = case.prompt(&model);
        let before = engines[1].stats();
        let mut runs = [(Vec::new(), Duration::ZERO), (Vec::new(), Duration::ZERO)];
        for turn in [at % 2, 1 - at % 2] {
            runs[turn] = answer(&engines[turn], &model, &prompt, most);
        }
        let [(plain, without), (tokens, with)] = runs;
        assert_eq!(tokens, plain, "{}", case.ask);
        let stats = engines[1].stats();
        let ratio = without.as_secs_f64() / with.as_secs_f64();
        let rate = |time: Duration| (tokens.len() - 1) as f64 / time.as_secs_f64();
        println!(
            "{}: {} + {} tokens, {:.1} and {:.1} tok/s, {ratio:.2}; {} steps, {} of {} drafts",
            case.kind,
            prompt.len(),
            tokens.len(),
            rate(without),
            rate(with),
            stats.steps - before.steps,
            stats.accepted_tokens - before.accepted_tokens,
            stats.draft_tokens - before.draft_tokens,
        );
        ratios.entry(case.kind.clone()).or_default().push(ratio);
    }
    for (kind, ratios) in ratios {
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let count = ratios.len();
        println!("{kind}: median {:.2}, least {least:.2} of {count}", median(ratios));
    }
}
