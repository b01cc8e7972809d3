//! Loads a release: turns its files into a started engine and its text side.

use super::draft_release::DraftRelease;
use super::models::gpu_kv_dtype;
use super::release_files::text;
use super::{Assembly, ComputeDevice};
use cresset_base::failpoint;
use cresset_catalogue::{Manifest, QualifiedModel};
use cresset_engine::boot_canary::{self, KnownAnswer};
use cresset_engine::{
    EngineError, EngineHandle, EngineOptions, EngineSettings, KvTypeSetting, ModelRunner, Runner,
};
use cresset_kernels::gpu::{Gpu, Kind, ProductChoices};
use cresset_models::{ModelCard, ModelOptions, ModelSource};
use cresset_pool::{DeviceBudget, LoadedEngine, ServedModel};
use cresset_qualification::CanaryCase;
use cresset_qualification::subject::Precision;
use cresset_text::TemplateLimits;
use std::sync::Arc;
use std::time::Duration;

impl Assembly {
    /// Loads the engine of a release that may not be qualified, for its checks. Blocking: it reads
    /// and repacks every weight.
    pub fn load_checked(
        &self,
        source: &ModelSource,
        checked: Checked<'_>,
    ) -> Result<LoadedEngine, EngineError> {
        let products = checked.products.clone();
        self.load_engine(source, (0, products), &[], Use::Check(checked))
    }

    /// A qualified release for the pool: its text side is loaded now (blocking), its engine on
    /// demand.
    pub fn served_model(&self, qualified: QualifiedModel) -> Result<ServedModel, EngineError> {
        let mut text = text(qualified.source(), self.template_limits())?;
        if let Some(text) = Arc::get_mut(&mut text) {
            text.formats = self.config.formats.clone();
        }
        let (manifest, header) = (qualified.manifest().clone(), text.header_blake3.clone());
        let max_context = self.max_context().unwrap_or(usize::MAX);
        let draft = self.draft_release(&manifest, &text)?;
        let assembly = self.clone();
        let load = Arc::new(move |device| {
            assembly.load_proven(&manifest, header.clone(), draft.as_ref(), device)
        });
        let context_rises = self.background_prover().is_some();
        Ok(ServedModel { qualified, text, max_context, context_rises, load })
    }

    /// Loads a release on the first device if it is qualified at this moment.
    pub fn load_qualified(&self, manifest: &Manifest) -> Result<LoadedEngine, EngineError> {
        self.load_proven(manifest, None, None, 0)
    }

    /// Loads a release on a device if it is qualified at this moment, and beside it the one that
    /// guesses its tokens. Its tokenizer was read from the GGUF header with that digest.
    pub(crate) fn load_proven(
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
        let products = ProductChoices::of(proven.products().iter().map(String::as_str));
        let loaded = self.load_engine(&source, (device, products), &canary, Use::Serve(draft));
        loaded.map_err(|error| explained(error, &source))
    }

    /// Bytes that a release is expected to take once it is loaded. On the CPU its weights take
    /// about as much as its files; so do quantised ones on a GPU, which holds every parameter in
    /// f32 where weights are dequantised, and a KV cache without a limit takes the rest. Reads
    /// headers (blocking).
    pub fn expected_bytes(&self, qualified: &QualifiedModel) -> u64 {
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
    pub fn device_budgets(&self) -> Vec<DeviceBudget> {
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
    pub fn model_budget(&self) -> u64 {
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
    pub fn precision(&self) -> Precision {
        let engine = &self.config.engine;
        match self.device.properties() {
            _ if engine.dequantise => Precision::Exact,
            Some(_) => Precision::Bf16,
            None if engine.activations == 8 => Precision::Bytes,
            None => Precision::Stored,
        }
    }

    pub fn template_limits(&self) -> TemplateLimits {
        let template = &self.config.template;
        let written_bytes = template.max_written_mib << 20;
        TemplateLimits { steps: template.max_steps, written_bytes }
    }

    /// Loads the weights on the device with this number, with the algorithms that are known for
    /// its products. Has them compute the canary, and starts the engine.
    fn load_engine(
        &self,
        source: &ModelSource,
        (device, products): (usize, ProductChoices),
        canary: &[KnownAnswer],
        used: Use,
    ) -> Result<LoadedEngine, EngineError> {
        failpoint!("node::loading");
        let device = self.devices().nth(device).expect("invariant: the pool has these devices");
        let mut model_options = self.model_options(device.open(products)?);
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
                let runner = (checked.wrap)(runner, RunnerSize { most_rows, block_size });
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
    pub fn kv_bytes(&self) -> usize {
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

/// How an engine is loaded whose model is being checked.
pub struct Checked<'a> {
    /// Puts a runner of the checks' own between the engine and its model.
    pub wrap: &'a dyn Fn(Box<dyn Runner>, RunnerSize) -> Box<dyn Runner>,
    /// Most blocks of the cache that are used for each group of layers.
    pub blocks: usize,
    /// The algorithms of a GPU's products, to which those of further shapes are added.
    pub products: &'a ProductChoices,
}

/// The sizes that an engine works with.
#[derive(Clone, Copy, Debug)]
pub struct RunnerSize {
    /// Most rows of a step for which the model computes logits.
    pub most_rows: usize,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
}

/// The memory that a release takes on a GPU with some settings.
pub struct GpuMemory {
    pub weight_bytes: u64,
    /// Bytes that a token takes in the cache, in all layers together, while all windows show it.
    pub token_bytes: usize,
    /// Bytes that the model's context takes in the cache at most.
    pub context_bytes: usize,
    pub kv_dtype: &'static str,
}

impl GpuMemory {
    pub fn of(card: &ModelCard, engine: &EngineSettings) -> Self {
        let dequantised = card.parameters() * Kind::F32.bytes() as u64;
        let options = as_written(engine);
        Self {
            weight_bytes: if engine.dequantise { dequantised } else { card.gpu_bytes },
            token_bytes: card.gpu_token_bytes(&options),
            context_bytes: card.gpu_context_bytes(&options, card.config.max_positions),
            kv_dtype: gpu_kv_dtype(engine),
        }
    }
}

/// Bytes that a model's context takes at most in the cache of a CPU.
pub fn cpu_context_bytes(card: &ModelCard, engine: &EngineSettings) -> usize {
    card.cpu_context_bytes(&as_written(engine), card.config.max_positions)
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

#[cfg(test)]
mod tests {
    use super::super::release_files::card;
    use super::*;
    use cresset_models::testing::TinyLlama;

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
}
