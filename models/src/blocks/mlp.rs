//! The gated feed-forward block with a fused gate and up projection.

use crate::Result;
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use crate::planted::{OpFault, argument};
use cresset_kernels::Ops;
use cresset_kernels::activation::{Activation, GatedArgs};

pub struct Mlp<O: Ops> {
    gate_up: O::Matrix,
    gate_up_bias: Option<O::Buffer>,
    down: O::Matrix,
    down_bias: Option<O::Buffer>,
    activation: Activation,
    /// `[tokens, 2 * intermediate]`
    projected: Activations<O>,
    /// `[tokens, intermediate]`
    activated: Activations<O>,
}

/// The names of an MLP's parts.
pub struct MlpNames {
    /// The beginning of the names of its tensors.
    pub module: &'static str,
    /// The names of its two activations.
    pub projected: &'static str,
    pub activated: &'static str,
}

pub const ALONE: MlpNames =
    MlpNames { module: "mlp", projected: "mlp gate and up", activated: "mlp activated" };

impl<O: Ops> Mlp<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str) -> Option<Self> {
        Self::load_as(l, prefix, &ALONE, l.spec.config.intermediate_size)
    }

    /// Loads one of a layer's MLPs, of the width `inner` between its matrices.
    pub fn load_as(
        l: &mut LayerLoader<O>,
        prefix: &str,
        names: &MlpNames,
        inner: usize,
    ) -> Option<Self> {
        let (hidden, options) = (l.spec.config.hidden_size, &l.spec.options);
        let name = |part: &str| format!("{prefix}{}.{part}", names.module);
        let t = &mut *l.tensors;
        let fused = name("gate_up_proj.weight");
        let gate_up = if t.has(&fused) {
            t.fused(&fused, &[(fused.as_str(), inner); 2], hidden)
        } else {
            let parts = [name("gate_proj.weight"), name("up_proj.weight")];
            t.stack(&parts.each_ref().map(|part| (part.as_str(), inner)), hidden)
        };
        let biases = [(&*name("gate_proj.bias"), inner), (&*name("up_proj.bias"), inner)];
        let gate_up_bias = t.bias_if(options.mlp_bias, &biases);
        let down = t.matrix(&name("down_proj.weight"), hidden, inner);
        let down_bias = t.bias_if(options.mlp_bias, &[(&name("down_proj.bias"), hidden)]);
        let (gate_up, gate_up_bias, down, down_bias) = (gate_up?, gate_up_bias?, down?, down_bias?);
        l.quantised |= O::is_quantised(&gate_up) || O::is_quantised(&down);
        Some(Self {
            gate_up,
            gate_up_bias,
            down,
            down_bias,
            activation: options.activation,
            projected: l.rows(names.projected, 2 * inner)?,
            activated: l.rows(names.activated, inner)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        let out = x.sublayer_out();
        self.compute(s, x, out)
    }

    /// `x.input()` → `result`.
    pub fn compute<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        x: &Stream<'a, O>,
        result: O::View<'a>,
    ) -> Result<()> {
        self.compute_part(s, x, result)?;
        s.add_ranks(result)
    }

    /// The same without the parts of other ranks.
    pub(super) fn compute_part<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        x: &Stream<'a, O>,
        result: O::View<'a>,
    ) -> Result<()> {
        let gate_up = self.projected.first(x.rows());
        s.input_linear(&self.gate_up, self.gate_up_bias.as_ref(), x, gate_up)?;
        let activation = argument(OpFault::Activation, self.activation, |_| Activation::GeluTanh);
        let width = self.activated.width;
        let out = self.activated.first(x.rows());
        let rounded = O::takes_rounded(&self.down);
        s.ops.gated(&GatedArgs { activation, gate_up, width, out, rounded })?;
        s.rounded_linear(&self.down, self.down_bias.as_ref(), out, result)
    }
}
