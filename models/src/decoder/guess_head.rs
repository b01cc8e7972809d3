//! The head with which some models guess the token behind the next one ("multi-token prediction"),
//! a draft for speculative decoding. DeepSeek-AI 2024, "DeepSeek-V3", section 2.2.
//!
//! At a position it reads the state that the model has there, behind the final norm, and the
//! embedding of the token that follows. Each is normed and multiplied by a matrix; the sum goes
//! through a layer like the model's, with K and V of its own, through a norm, and through the
//! model's output matrix. That gives the token behind the one that follows. The head's own state
//! behind that norm then stands for the model's at the next position, so that it can guess on.

use super::activations::Activations;
use super::layer_loader::LayerLoader;
use super::step::{Layer, LayerStep, Stream};
use crate::Result;
use crate::loader::tensors::Tensors;
use cresset_kernels::Ops;
use cresset_kernels::embedding::SelectRowsArgs;
use cresset_kernels::operand::IndicesOf;

/// The names that a release gives to the tensors of its head.
pub(crate) struct HeadNames {
    /// The beginning of those of its layer.
    pub(crate) layer: String,
    /// Its matrix, the norms of embeddings and of states, and the last norm.
    own: [String; 4],
}

impl HeadNames {
    /// The beginning of all names of heads that are apart from the model's layers.
    pub(crate) const APART: &str = "mtp.";

    /// The names of the head that the files have, if they have one. `layers` is the number of the
    /// model's own layers.
    pub(crate) fn find<O: Ops>(t: &Tensors<O>, layers: usize) -> Option<Self> {
        let behind = format!("model.layers.{layers}.");
        let own = ["eh_proj", "enorm", "hnorm", "shared_head.norm"];
        let own = own.map(|name| format!("{behind}{name}.weight"));
        let apart = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];
        let apart = apart.map(|name| format!("{}{name}.weight", Self::APART));
        let layer = format!("{}layers.0.", Self::APART);
        let known = [Self { layer: behind, own }, Self { layer, own: apart }];
        known.into_iter().find(|names| t.has(&names.own[0]))
    }
}

pub(crate) struct GuessHead<O: Ops> {
    /// `[hidden, hidden]` each: the left half of the head's matrix and the right one.
    of_tokens: O::Matrix,
    of_states: O::Matrix,
    token_norm: O::Buffer,
    state_norm: O::Buffer,
    layer: Box<dyn Layer<O>>,
    norm: O::Buffer,
    /// `[tokens, hidden]`: the states of the latest step, of the model or of the head.
    states: Activations<O>,
}

impl<O: Ops> GuessHead<O> {
    /// Loads the head, whose layer has this number.
    pub(crate) fn load(
        l: &mut LayerLoader<O>,
        layer: usize,
        names: HeadNames,
        load_layer: impl FnOnce(&mut LayerLoader<O>) -> Option<Box<dyn Layer<O>>>,
    ) -> Option<Self> {
        let (hidden, [matrix, token, state, last]) = (l.spec.config.hidden_size, &names.own);
        l.begin(layer, names.layer);
        let halves = l.tensors.column_halves(matrix, [hidden; 2]);
        let [token, state, last] = [token, state, last].map(|name| l.tensors.norm(name, hidden));
        let layer = load_layer(l);
        let [of_tokens, of_states] = halves?;
        Some(Self {
            of_tokens,
            of_states,
            token_norm: token?,
            state_norm: state?,
            layer: layer?,
            norm: last?,
            states: l.rows("states of the guessing head", hidden)?,
        })
    }

    /// Norms the residual stream and keeps it as the states of the step.
    pub(super) fn keep_states<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        norm: &'a O::Buffer,
        x: &Stream<'a, O>,
    ) -> Result<O::View<'a>> {
        let delta = x.pending.then(|| x.sublayer_out.first(x.rows));
        let states = self.states.first(x.rows);
        s.norm(x.residual(), delta, norm, states)?;
        Ok(states)
    }

    /// The same behind the head's own layer.
    pub(super) fn keep_own_states<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        x: &Stream<'a, O>,
    ) -> Result<O::View<'a>> {
        self.keep_states(s, &self.norm, x)
    }

    /// The states of the rows that get logits.
    pub(super) fn selected_states<'a>(&'a self, s: &LayerStep<'a, O>) -> Result<O::View<'a>> {
        s.select(self.states.first(s.batch.tokens), s.selected, s.batch.logits_rows)?;
        Ok(s.selected.first(s.batch.logits_rows))
    }

    /// The states of the rows `sources` of the latest step → what the residual stream is given.
    pub(super) fn read_states<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        sources: IndicesOf<'a, O>,
        x: &mut Stream<'a, O>,
    ) -> Result<()> {
        let (states, normed) = (O::view(&self.states.buffer), x.normed.first(x.rows));
        let args = SelectRowsArgs {
            x: states,
            width: self.states.width,
            rows: sources,
            out: x.residual(),
        };
        s.ops.select_rows(&args)?;
        s.norm(x.residual(), None, &self.state_norm, normed)?;
        s.linear(&self.of_states, None, normed, x.sublayer_out())
    }

    /// The embeddings in the residual stream → the head's layer.
    pub(super) fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        let normed = x.normed.first(x.rows);
        s.norm(x.residual(), None, &self.token_norm, normed)?;
        s.linear(&self.of_tokens, None, normed, x.residual())?;
        self.layer.forward(s, x)
    }
}
