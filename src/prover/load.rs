//! Loads a release for its checks: an engine that can score given texts, and the text side.

use crate::Prover;
use crate::scoring::{Scoring, ScoringRunner};
use cresset_engine::{EngineError, EngineHandle};
use cresset_kernels::gpu::ProductChoices;
use cresset_models::ModelSource;
use cresset_node::{Checked, RunnerSize, text};
use cresset_pool::LoadedEngine;
use cresset_text::TextModel;
use std::sync::Arc;

/// A loaded model that may not be qualified: for qualifying it and for tests, never for serving it.
#[derive(Clone)]
pub struct UnqualifiedModel {
    pub text: Arc<TextModel>,
    pub engine: EngineHandle,
    /// Memory of its weights and its KV cache.
    pub bytes: u64,
    pub(super) source: ModelSource,
    pub(super) scoring: Scoring,
    pub(super) products: ProductChoices,
}

impl Prover<'_> {
    /// Loads a release that may not be qualified, with these algorithms of a GPU's products.
    /// Blocking: it reads and repacks every weight.
    pub fn load(
        &self,
        source: &ModelSource,
        products: &ProductChoices,
    ) -> Result<UnqualifiedModel, EngineError> {
        self.load_with(source, Scoring::default(), products)
    }

    pub(super) fn load_with(
        &self,
        source: &ModelSource,
        scoring: Scoring,
        products: &ProductChoices,
    ) -> Result<UnqualifiedModel, EngineError> {
        let text = text(source, self.template_limits())?;
        let source = source.clone().with_header(text.header_blake3.clone());
        let products = products.clone();
        let LoadedEngine { engine, bytes } =
            self.load_scored(&source, &scoring, usize::MAX, &products)?;
        Ok(UnqualifiedModel { text, engine, bytes, source, scoring, products })
    }

    /// Loads the engine alone, with at most `blocks` blocks of its cache.
    pub(super) fn load_scored(
        &self,
        source: &ModelSource,
        scoring: &Scoring,
        blocks: usize,
        products: &ProductChoices,
    ) -> Result<LoadedEngine, EngineError> {
        let wrap = |runner, RunnerSize { most_rows, block_size }| {
            let runner = scoring.spoiled(runner, block_size);
            Box::new(ScoringRunner::new(runner, scoring.clone(), most_rows)) as _
        };
        self.load_checked(source, Checked { wrap: &wrap, blocks, products })
    }
}
