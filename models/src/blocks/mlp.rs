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

impl<O: Ops> Mlp<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str) -> Option<Self> {
        let (config, options) = (&l.spec.config, &l.spec.options);
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let name = |part: &str| format!("{prefix}mlp.{part}");
        let t = &mut *l.tensors;
        let gate_up = t
            .stack(&[(&name("gate_proj.weight"), inner), (&name("up_proj.weight"), inner)], hidden);
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
            projected: l.rows("mlp gate and up", 2 * inner)?,
            activated: l.rows("mlp activated", inner)?,
        })
    }

    /// `x.normed()` → `x.sublayer_out()`.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        let gate_up = self.projected.first(x.rows());
        s.linear(&self.gate_up, self.gate_up_bias.as_ref(), x.normed(), gate_up)?;
        let activation = argument(OpFault::Activation, self.activation, |_| Activation::GeluTanh);
        let width = self.activated.width;
        let out = self.activated.first(x.rows());
        s.ops.gated(&GatedArgs { activation, gate_up, width, out })?;
        s.linear(&self.down, self.down_bias.as_ref(), out, x.sublayer_out())
    }
}
