//! Loads a release: turns its files into a started engine and its text side.

use super::draft_release::DraftRelease;
use super::models::gpu_kv_dtype;
use super::scoring::{Scoring, ScoringRunner};
use super::{Assembly, ComputeDevice};
use cresset_base::failpoint;
use cresset_catalogue::{Manifest, QualifiedModel};
use cresset_engine::EngineSettings;
use cresset_engine::KvTypeSetting;
use cresset_engine::boot_canary::{self, KnownAnswer};
use cresset_engine::model_runner::ModelRunner;
use cresset_engine::runner::Runner;
use cresset_engine::{EngineError, EngineHandle, EngineOptions};
use cresset_kernels::gpu::{Gpu, Kind};
use cresset_models::{ModelCard, ModelOptions, ModelSource};
use cresset_pool::{DeviceBudget, LoadedEngine, ServedModel};
use cresset_qualification::CanaryCase;
use cresset_qualification::subject::Precision;
use cresset_text::{TemplateLimits, TextModel};
use std::sync::Arc;
use std::time::Duration;

/// A loaded model that may not be qualified: for qualifying it and for tests, never for serving it.
#[derive(Clone)]
pub struct UnqualifiedModel {
    pub text: Arc<TextModel>,
    pub engine: EngineHandle,
    /// Memory of its weights and its KV cache.
    pub bytes: u64,
    pub(super) source: ModelSource,
    pub(super) scoring: Scoring,
}

impl Assembly {
    /// Loads a release that may not be qualified. Blocking: it reads and repacks every weight.
    pub fn load(&self, source: &ModelSource) -> Result<UnqualifiedModel, EngineError> {
        self.load_with(source, Scoring::default())
    }

    pub(super) fn load_with(
        &self,
        source: &ModelSource,
        scoring: Scoring,
    ) -> Result<UnqualifiedModel, EngineError> {
        let text = text(source, self.template_limits())?;
        let source = source.clone().with_header(text.header_blake3.clone());
        let checked = Checked { scoring: &scoring, blocks: usize::MAX };
        let LoadedEngine { engine, bytes } =
            self.load_engine(&source, 0, &[], Use::Check(checked))?;
        Ok(UnqualifiedModel { text, engine, bytes, source, scoring })
    }

    /// Loads the engine of a release for its checks once more, with `blocks` blocks of its cache.
    pub(super) fn load_again(
        &self,
        source: &ModelSource,
        scoring: &Scoring,
        blocks: usize,
    ) -> Result<EngineHandle, EngineError> {
        let checked = Checked { scoring, blocks };
        Ok(self.load_engine(source, 0, &[], Use::Check(checked))?.engine)
    }

    /// A qualified release for the pool: its text side is loaded now (blocking), its engine on
    /// demand.
    pub(super) fn served_model(
        &self,
        qualified: QualifiedModel,
    ) -> Result<ServedModel, EngineError> {
        let text = text(qualified.source(), self.template_limits())?;
        let (manifest, header) = (qualified.manifest().clone(), text.header_blake3.clone());
        let max_context = self.max_context().unwrap_or(usize::MAX);
        let draft = self.draft_release(&manifest, &text)?;
        let assembly = self.clone();
        let load = Arc::new(move |device| {
            assembly.load_proven(&manifest, header.clone(), draft.as_ref(), device)
        });
        let keeps_formats = self.keeps_formats();
        Ok(ServedModel { qualified, text, max_context, keeps_formats, load })
    }

    /// Loads a release on a device if it is qualified at this moment, and beside it the one that
    /// guesses its tokens. Its tokenizer was read from the GGUF header with that digest.
    pub(super) fn load_proven(
        &self,
        manifest: &Manifest,
        header: Option<String>,
        draft: Option<&DraftRelease>,
        device: usize,
    ) -> Result<LoadedEngine, EngineError> {
        let proven = self.qualified(manifest, &self.host()).map_err(|why| match why {
            _ if why.is_about_bytes() => EngineError::FilesChanged(why.to_string()),
            _ => EngineError::Unproven(why.to_string()),
        })?;
        let source = proven.source().clone().with_header(header);
        let canary = known_answers(proven.canary());
        if canary.is_empty() {
            let name = &manifest.name;
            let what = format!("the record of {name} has no canary: run `cresset qualify {name}`");
            return Err(EngineError::Unproven(what));
        }
        let loaded = self.load_engine(&source, device, &canary, Use::Serve(draft));
        loaded.map_err(|error| explained(error, &source))
    }

    /// Bytes that a release is expected to take once it is loaded. On the CPU its weights take
    /// about as much as its files; so do quantised ones on a GPU, which holds every parameter in
    /// f32 where weights are dequantised, and a KV cache without a limit takes the rest. Reads
    /// headers (blocking).
    pub(super) fn expected_bytes(&self, qualified: &QualifiedModel) -> u64 {
        let (engine, files) = (&self.config.engine, qualified.manifest().bytes());
        if self.device.properties().is_none() {
            return files + self.kv_bytes() as u64 + self.draft_bytes(qualified);
        }
        if engine.gpu_kv_mib == 0 {
            return self.model_budget();
        }
        // Files whose headers cannot be read are refused by the load.
        let weights = cresset_models::inspect(qualified.source())
            .map_or(files, |card| GpuMemory::of(&card, engine).weight_bytes);
        weights + ((engine.gpu_kv_mib as u64) << 20)
    }

    /// The devices that models run on. Engines on the CPU share its memory.
    pub(super) fn device_budgets(&self) -> Vec<DeviceBudget> {
        let count = self.devices().count();
        let is_cpu = self.device.properties().is_none();
        let bytes = if is_cpu { self.model_budget() / count as u64 } else { self.model_budget() };
        let name = |(number, device): (usize, &ComputeDevice)| match device.name() {
            Some(name) => name,
            None if count > 1 => format!("cpu:{number}"),
            None => "cpu".to_owned(),
        };
        let named = self.devices().enumerate().map(name);
        named.map(|name| DeviceBudget { name, bytes }).collect()
    }

    /// Bytes that all models loaded on one device together may take; on the CPU, in all engines.
    pub(super) fn model_budget(&self) -> u64 {
        let engine = &self.config.engine;
        let Some(gpu) = self.device.properties() else { return self.config.model_bytes() };
        let share = (gpu.memory_bytes as f64 * engine.gpu_memory_share) as u64;
        let on_gpu = share.saturating_sub((engine.gpu_reserve_mib as u64) << 20);
        match engine.memory_mib as u64 {
            0 => on_gpu,
            mib => on_gpu.min(mib << 20),
        }
    }

    /// How exactly models with quantised weights are computed.
    pub(super) fn precision(&self) -> Precision {
        let engine = &self.config.engine;
        match self.device.properties() {
            _ if engine.dequantise => Precision::Exact,
            Some(_) => Precision::Bf16,
            None if engine.activations == 8 => Precision::Bytes,
            None => Precision::Stored,
        }
    }

    pub(super) fn template_limits(&self) -> TemplateLimits {
        let template = &self.config.template;
        let written_bytes = template.max_written_mib << 20;
        TemplateLimits { steps: template.max_steps, written_bytes }
    }

    /// Loads the weights on the device with this number, has them compute the canary, and starts
    /// the engine.
    fn load_engine(
        &self,
        source: &ModelSource,
        device: usize,
        canary: &[KnownAnswer],
        used: Use,
    ) -> Result<LoadedEngine, EngineError> {
        failpoint!("node::loading");
        let device = self.devices().nth(device).expect("invariant: the pool has these devices");
        let mut model_options = self.model_options(device.open()?);
        // One proposer is enough.
        let guesses = matches!(used, Use::Serve(None));
        model_options.guesses = guesses && self.config.engine.speculative_tokens > 0;
        let on_gpu = model_options.gpu.is_some();
        let (mut runner, info) = ModelRunner::load(source, &model_options)?;
        // A model whose cache takes the rest of a GPU takes it whole, to the byte.
        let takes_all = on_gpu && model_options.gpu_kv_mib == 0;
        let bytes = if takes_all { self.model_budget() } else { info.memory_bytes as u64 };
        let engine = &self.config.engine;
        let blocks = used.blocks().saturating_mul(info.cache.windows.len()).min(info.num_blocks);
        let most = self.max_context().unwrap_or(usize::MAX).min(info.config.max_positions);
        let options = EngineOptions::new(engine, blocks, info.cache.clone(), most);
        let patience = Duration::from_secs(engine.boot_canary_seconds);
        let decisive = self.precision().decisive_margin();
        boot_canary::compare(&mut runner, &options, canary, decisive, patience)?;
        let most_rows = if on_gpu { options.max_rows } else { usize::MAX };
        let (runner, block_size) = (Box::new(runner), options.block_size);
        match used {
            Use::Check(checked) => {
                let runner = scored(runner, checked.scoring, most_rows, block_size);
                Ok(LoadedEngine { engine: EngineHandle::start(runner, options), bytes })
            }
            Use::Serve(draft) => {
                let load = |draft| self.load_draft_model(draft, &info, &model_options, &options);
                let (model, more) = draft.map(load).transpose()?.unzip();
                let engine = EngineHandle::start_with(runner, model, options);
                Ok(LoadedEngine { engine, bytes: bytes + more.unwrap_or(0) })
            }
        }
    }

    /// `gpus`: those that compute the model, if any.
    fn model_options(&self, gpus: Vec<Arc<dyn Gpu>>) -> ModelOptions {
        let engine = &self.config.engine;
        let mut gpus = gpus.into_iter();
        ModelOptions {
            gpu: gpus.next(),
            further_ranks: gpus.collect(),
            threads: self.config.threads(),
            byte_activations: engine.activations == 8 && !engine.dequantise,
            kv_bytes: self.kv_bytes(),
            max_context: self.max_context(),
            ..as_written(engine)
        }
    }

    /// Bytes of the machine's own memory for one model's KV cache.
    pub(super) fn kv_bytes(&self) -> usize {
        if self.device.properties().is_some() { 0 } else { self.config.engine.kv_mib << 20 }
    }

    /// `None` stands for the model's own limit, which the configuration writes as 0.
    fn max_context(&self) -> Option<usize> {
        Some(self.config.engine.max_context).filter(|limit| *limit > 0)
    }
}

macro_rules! define_as_written {
    ($($(#[$about:meta])* pub $setting:ident: $type:ty = $default:expr,)*) => {
        /// The settings that reach a model as they are written, and the type of its cache.
        fn as_written(engine: &EngineSettings) -> ModelOptions {
            let fp8_cache = engine.kv_dtype == KvTypeSetting::Fp8;
            ModelOptions { $($setting: engine.$setting,)* fp8_cache, ..ModelOptions::default() }
        }
    };
}

cresset_models::model_settings!(define_as_written);

/// What an engine is loaded for.
enum Use<'a> {
    Check(Checked<'a>),
    /// With the release that guesses its tokens, if there is one.
    Serve(Option<&'a DraftRelease>),
}

impl Use<'_> {
    /// Most blocks of the cache that are used for each group of layers.
    fn blocks(&self) -> usize {
        match self {
            Self::Check(checked) => checked.blocks,
            Self::Serve(_) => usize::MAX,
        }
    }
}

/// An engine whose model is being checked.
struct Checked<'a> {
    /// How given texts are scored.
    scoring: &'a Scoring,
    /// Most blocks of the cache that are used for each group of layers.
    blocks: usize,
}

/// The runner, able to score given texts.
fn scored(
    runner: Box<dyn Runner>,
    scoring: &Scoring,
    most_rows: usize,
    block_size: usize,
) -> Box<dyn Runner> {
    let runner = scoring.spoiled(runner, block_size);
    Box::new(ScoringRunner::new(runner, scoring.clone(), most_rows))
}

/// Refuses what this build cannot serve. It reads headers, tokenizer and template, no weights.
pub fn inspect(source: &ModelSource) -> Result<(), String> {
    cresset_models::inspect(source).map_err(|error| error.to_string())?;
    TextModel::load(source).map_err(|error| error.to_string())?;
    Ok(())
}

/// What the headers of a release tell of it.
pub fn card(source: &ModelSource) -> Result<ModelCard, String> {
    cresset_models::inspect(source).map_err(|error| error.to_string())
}

/// The memory that a release takes on a GPU with some settings.
pub struct GpuMemory {
    pub weight_bytes: u64,
    /// Bytes that a token takes in the cache, in all layers together.
    pub token_bytes: usize,
    pub kv_dtype: &'static str,
}

impl GpuMemory {
    pub fn of(card: &ModelCard, engine: &EngineSettings) -> Self {
        let dequantised = card.parameters() * Kind::F32.bytes() as u64;
        Self {
            weight_bytes: if engine.dequantise { dequantised } else { card.gpu_bytes },
            token_bytes: card.gpu_token_bytes(&as_written(engine)),
            kv_dtype: gpu_kv_dtype(engine),
        }
    }
}

/// Files that cannot be loaded are often other files, which is the better explanation.
fn explained(error: EngineError, source: &ModelSource) -> EngineError {
    if !matches!(error, EngineError::NotLoaded(_)) {
        return error;
    }
    match source.check(u64::MAX) {
        Err(cresset_models::Error::Changed(why)) => EngineError::FilesChanged(why),
        _ => error,
    }
}

fn known_answers(canary: &[CanaryCase]) -> Vec<KnownAnswer> {
    let known = |case: &CanaryCase| KnownAnswer {
        prompt: case.prompt.clone(),
        tokens: case.tokens.clone(),
        margins: case.margins.clone(),
    };
    canary.iter().map(known).collect()
}

pub(super) fn text(
    source: &ModelSource,
    limits: TemplateLimits,
) -> Result<Arc<TextModel>, EngineError> {
    let unusable = |error: cresset_text::Error| EngineError::NotLoaded(error.to_string());
    TextModel::load_within(source, limits).map(Arc::new).map_err(unusable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use cresset_base::clock::{Clock, SystemClock};
    use cresset_kernels::gpu::Emulator;
    use cresset_models::loader::gguf::Value;
    use cresset_models::testing::{GgufWriter, TinyLlama};
    use cresset_qualification::{Record, Suite, Verdict};

    /// A tiny model with a context of 8 192 tokens that was qualified and accepted.
    fn qualified(kv_mib: usize) -> (tempfile::TempDir, Assembly, Manifest, Record) {
        let (data, mut config) = (tempfile::tempdir().unwrap(), Config::default());
        (config.engine.kv_mib, config.engine.max_batched_tokens) = (kv_mib, 256);
        config.qualification.quick_context_tokens = 1 << 20;
        let mut gguf = TinyLlama::default().gguf();
        gguf.set("llama.context_length", Value::U32(8192));
        let file = data.path().join("tiny.gguf");
        std::fs::write(&file, gguf.to_bytes()).unwrap();
        let assembly = Assembly::new(data.path().to_owned(), config).unwrap();
        let catalogue = assembly.catalogue();
        let manifest = catalogue.add(&file, None, &inspect, &mut |_| {}).unwrap();
        let record = assembly.qualify(&manifest, Suite::Quick, None, &mut |_| {}).unwrap();
        assert_eq!(record.verdict, Verdict::Qualified, "{:?}", record.checks);
        catalogue.accept(&record, true, "it is a test's", SystemClock.now()).unwrap();
        (data, assembly, manifest, record)
    }

    /// The release that guesses tokens takes memory of its own, which counts. One with another
    /// tokenizer is refused, and so is one that is not here.
    #[test]
    fn a_draft_model_is_loaded_beside_the_model_that_it_guesses_for() {
        let (data, mut assembly, manifest, _record) = qualified(1);
        let mut gguf = TinyLlama { seed: 1, layers: 1, ..TinyLlama::default() }.gguf();
        let add = |name: &str, gguf: &GgufWriter| {
            let file = data.path().join(format!("{name}.gguf"));
            std::fs::write(&file, gguf.to_bytes()).unwrap();
            assembly.catalogue().add(&file, Some(name), &inspect, &mut |_| {}).unwrap();
        };
        add("small", &gguf);
        let Some(Value::Array(tokens)) = gguf.get("tokenizer.ggml.tokens").cloned() else {
            panic!("a GGUF file has tokens")
        };
        let swapped = tokens[..10].iter().chain([&tokens[11], &tokens[10]]).chain(&tokens[12..]);
        gguf.set("tokenizer.ggml.tokens", Value::Array(swapped.cloned().collect()));
        add("other", &gguf);
        let mut serve = |small: &str| {
            assembly.config.engine.draft_models =
                [(manifest.name.clone(), small.to_owned())].into();
            let proven = assembly.qualified(&manifest, &assembly.host()).unwrap();
            let expected = assembly.expected_bytes(&proven);
            assembly.served_model(proven).map(|served| (expected, (served.load)(0).unwrap().bytes))
        };
        let (expected, bytes) = serve("small").unwrap();
        let other = serve("other").unwrap_err().to_string();
        assert!(
            other.contains("other cannot guess the tokens of tiny: their tokenizers"),
            "{other}"
        );
        let gone = serve("gone").unwrap_err().to_string();
        assert!(gone.contains("engine.draft_models names gone"), "{gone}");
        let alone = assembly.load_proven(&manifest, None, None, 0).unwrap().bytes;
        // Half the layers, so half the cache.
        assert!((alone + (1 << 19)..alone + (1 << 20)).contains(&bytes), "{alone} and {bytes}");
        assert!(bytes.abs_diff(expected) < 1 << 18, "{bytes} where {expected} were expected");
    }

    /// It listed 8 192 tokens and refused 700.
    #[test]
    fn no_context_is_proven_that_the_cache_cannot_hold() {
        let (_data, assembly, manifest, record) = qualified(1);
        let served =
            assembly.load_proven(&manifest, None, None, 0).unwrap().engine.options().clone();
        assert_eq!(served.max_context, served.num_blocks * served.block_size);
        assert!(served.max_context < 8192, "the cache is small: {served:?}");
        assert_eq!(record.qualified_context_tokens as usize, served.max_context);
    }

    #[test]
    fn a_model_that_computes_other_tokens_than_its_record_says_is_not_served() {
        let (_data, assembly, manifest, mut record) = qualified(64);
        assembly.load_proven(&manifest, None, None, 0).unwrap();
        let positions = |record: &Record| record.canary.iter().map(|case| case.tokens.len()).sum();
        let all: usize = positions(&record);
        assert_eq!(all, 64);
        let failure = |record: &Record| {
            assembly.catalogue().save_record(record).unwrap();
            assembly.load_proven(&manifest, None, None, 0).err().map(|why| why.kind())
        };
        let last = &mut record.canary[3];
        (last.tokens[9], last.margins[9]) = (last.tokens[9] ^ 1, 1.0);
        record.id = uuid::Uuid::now_v7();
        assert_eq!(failure(&record), Some("wrong_answers"));
        record.canary.clear();
        record.id = uuid::Uuid::now_v7();
        assert_eq!(failure(&record), Some("unproven"), "nothing to compare proves nothing");
    }

    /// A head of a token has a scale of two bytes in FP8.
    #[test]
    fn a_token_takes_what_its_type_takes_on_a_gpu() {
        let (data, gguf) = (tempfile::tempdir().unwrap(), TinyLlama::default().gguf());
        let file = data.path().join("tiny.gguf");
        std::fs::write(&file, gguf.to_bytes()).unwrap();
        let card = card(&ModelSource::gguf(file)).unwrap();
        let heads = 2 * card.config.layers * card.config.kv_heads;
        let dim = card.config.head_dim;
        let check = |kv_dtype, dequantise, bytes: usize, name: &str| {
            let engine = EngineSettings { kv_dtype, dequantise, ..EngineSettings::default() };
            let told = GpuMemory::of(&card, &engine);
            assert_eq!((told.token_bytes, told.kv_dtype), (heads * bytes + 4, name));
        };
        check(KvTypeSetting::Auto, false, 2 * dim, "bf16");
        check(KvTypeSetting::Auto, true, 4 * dim, "f32");
        check(KvTypeSetting::Fp8, false, dim + 2, "fp8 (e4m3)");
    }

    #[test]
    fn a_model_on_a_gpu_is_counted_by_what_it_takes_there() {
        let (_data, mut assembly, manifest, _) = qualified(64);
        let model = assembly.qualified(&manifest, &assembly.host()).unwrap();
        let card = card(model.source()).unwrap();
        let (parameters, weights) = (card.parameters(), card.gpu_bytes);
        // The vectors of five norms stay in f32.
        assert_eq!(weights, 2 * parameters + 2 * 5 * 64);
        let properties = Emulator::card("rtx-3060", 12_000 << 20).unwrap();
        assembly.device = ComputeDevice::Gpu { number: 0, further: Vec::new(), properties };
        let mut check = |change: fn(&mut EngineSettings), budget_mib: u64, bytes: u64| {
            change(&mut assembly.config.engine);
            let found = (assembly.model_budget(), assembly.expected_bytes(&model));
            assert_eq!(found, (budget_mib << 20, bytes));
        };
        // Nine tenths less the reserve; without a size of its own the cache takes the rest.
        check(|_| (), 10_288, 10_288 << 20);
        check(|engine| engine.gpu_kv_mib = 300, 10_288, weights + (300 << 20));
        check(|engine| engine.dequantise = true, 10_288, 4 * parameters + (300 << 20));
        check(|engine| engine.gpu_reserve_mib = 1_000, 9_800, 4 * parameters + (300 << 20));
        check(|engine| engine.memory_mib = 20_000, 9_800, 4 * parameters + (300 << 20));
        check(|engine| engine.memory_mib = 700, 700, 4 * parameters + (300 << 20));
    }
}
