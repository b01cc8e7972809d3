//! Finds the releases that may be served here, and qualifies one on this machine.

use super::{Assembly, NodeError};
use crate::config::GradeSetting;
use cresset_base::{Clock, SystemClock, failpoint};
use cresset_catalogue::{
    self, Catalogue, DoorRules, Manifest, NotQualified, QualifiedModel, describe_host,
};
use cresset_engine::{EngineSettings, KvTypeSetting};
use cresset_kernels::gpu::ProductChoices;
use cresset_kernels::instruction_set;
use cresset_kernels::linear::packed_types;
use cresset_qualification::{Grade, HostIdentity, ServingSettings};
use std::sync::atomic::Ordering;

/// The type of keys and values in the cache of a GPU.
pub(crate) fn gpu_kv_dtype(engine: &EngineSettings) -> &'static str {
    match (engine.dequantise, engine.kv_dtype) {
        (true, _) => "f32",
        (false, KvTypeSetting::Auto) => "bf16",
        (false, KvTypeSetting::Fp8) => "fp8 (e4m3)",
    }
}

/// The qualified models of a data folder.
pub struct Servable {
    pub models: Vec<QualifiedModel>,
    /// Why each other pulled release is not served. Empty when the caller named the models: it did
    /// not ask about the rest.
    pub refused: Vec<String>,
}

impl Assembly {
    /// The releases of the data folder.
    pub fn catalogue(&self) -> Catalogue {
        Catalogue::new(&self.data_dir)
    }

    /// This build on this hardware with these settings: a qualification is valid for them alone.
    pub fn host(&self) -> HostIdentity {
        let engine = &self.config.engine;
        let (dtype, kv_dtype) = self.dtypes();
        let on_device = self.device.properties().is_some();
        let settings = ServingSettings {
            dtype: dtype.into(),
            kv_dtype: kv_dtype.into(),
            dequantise: engine.dequantise,
            weights: self.weight_forms(),
            instruction_set: if on_device { String::new() } else { instruction_set().into() },
            block_size: engine.block_size,
            max_batched_tokens: engine.max_batched_tokens,
            max_rows: engine.max_rows,
            max_context: engine.max_context,
            kv_mib: if on_device { 0 } else { engine.kv_mib },
            gpu_graph_rows: if on_device { engine.gpu_graph_rows } else { 0 },
            tensor_parallel: if on_device { engine.tensor_parallel } else { 0 },
        };
        describe_host(self.device.properties(), self.config.threads(), settings)
    }

    /// The algorithms of products with which a release is checked: those that it was proven with
    /// on this hardware, if it was. What is missing is measured, and belongs to the next proof.
    pub fn products_to_check(&self, manifest: &Manifest) -> Result<ProductChoices, NodeError> {
        if self.device.properties().is_none() {
            return Ok(ProductChoices::default());
        }
        let hardware = self.host().hardware;
        let known = self.catalogue().products(&manifest.name, &hardware).map_err(NodeError::new)?;
        let known = ProductChoices::of(known.iter().map(String::as_str));
        Ok(if known.lines().is_empty() { self.device.cached_products() } else { known })
    }

    /// Whether an answer is the same to the last bit however it is computed.
    pub fn is_deterministic(&self) -> bool {
        self.device.properties().is_none() || self.config.engine.deterministic
    }

    /// The forms in which a device keeps weights: a record tells under which a model was proven.
    fn weight_forms(&self) -> String {
        match (self.device.properties(), self.config.engine.dequantise) {
            (None, _) => String::new(),
            (Some(_), true) => "f32".into(),
            (Some(_), false) => {
                let packed: Vec<_> = packed_types().map(|dtype| format!("{dtype:?}")).collect();
                format!("{} as stored, others in bf16", packed.join(" "))
            }
        }
    }

    /// Types of the activations, and of keys and values in the cache.
    fn dtypes(&self) -> (&'static str, &'static str) {
        let engine = &self.config.engine;
        let kept = gpu_kv_dtype(engine);
        match (self.device.properties().is_some(), engine.dequantise, engine.deterministic) {
            (_, true, false) | (false, true, _) => ("f32", "f32"),
            (false, false, _) if engine.activations == 8 => {
                ("f32, in products with quantised weights 8 bits", "f16 beside quantised weights")
            }
            (false, false, _) => ("f32", "f16 beside quantised weights"),
            (true, true, true) => ("f32, deterministic", kept),
            (true, false, true) if engine.activations == 8 => {
                ("bf16, in products with E4M3 weights 8 bits, deterministic", kept)
            }
            (true, false, false) if engine.activations == 8 => {
                ("bf16, in products with E4M3 weights 8 bits", kept)
            }
            (true, false, true) => ("bf16, deterministic", kept),
            (true, false, false) => ("bf16", kept),
        }
    }

    /// The release with its qualification on `host`, or the reason why it may not be served.
    pub fn qualified(
        &self,
        manifest: &Manifest,
        host: &HostIdentity,
    ) -> Result<QualifiedModel, NotQualified> {
        let rules = DoorRules {
            max_age_days: self.max_age_days.load(Ordering::Relaxed),
            require: grade(self.config.qualification.require),
            any_tool_choice: self.config.qualification.any_tool_choice,
        };
        self.catalogue().qualified(manifest, host, rules, SystemClock.now())
    }

    /// Every release that is qualified here: first the named ones, in their order. Fails when a
    /// named one is not qualified. There may be none.
    pub fn servable(&self, names: &[String]) -> Result<Servable, NodeError> {
        failpoint!("node::reading");
        let (catalogue, host) = (self.catalogue(), self.host());
        let mut models = Vec::new();
        for name in names {
            let manifest = catalogue.find(name).map_err(NodeError::new)?;
            models.push(self.qualified(&manifest, &host).map_err(NodeError::new)?);
        }
        let (all, mut refused) = self.releases(&host)?;
        for model in all {
            if models.iter().all(|known| known.id() != model.id()) {
                models.push(model);
            }
        }
        if !names.is_empty() {
            refused.clear();
        }
        Ok(Servable { models, refused })
    }

    /// The pulled releases that are qualified on `host`, and why each other one is not.
    pub fn releases(
        &self,
        host: &HostIdentity,
    ) -> Result<(Vec<QualifiedModel>, Vec<String>), NodeError> {
        let catalogue = self.catalogue();
        let (mut models, mut refused) = (Vec::new(), Vec::new());
        for manifest in catalogue.manifests().map_err(NodeError::new)? {
            match self.qualified(&manifest, host) {
                Ok(model) => models.push(model),
                Err(NotQualified::Files(cresset_catalogue::Error::NotPulled { .. })) => {}
                Err(why) => refused.push(why.to_string()),
            }
        }
        Ok((models, refused))
    }
}

fn grade(setting: GradeSetting) -> Grade {
    match setting {
        GradeSetting::Reference => Grade::Reference,
        GradeSetting::Like => Grade::Like,
        GradeSetting::SelfOnly => Grade::SelfOnly,
    }
}

pub fn cannot_load(name: &str, why: impl std::fmt::Display) -> NodeError {
    NodeError::new(format!("cannot load {name}: {why}"))
        .remedy("if its files are damaged, pull or add it again")
}
