//! The gated feed-forward block with a fused gate and up projection.

use crate::arch::Recipe;
use crate::decoder::workspace::Workspace;
use crate::loader::store::{Host, Store};
use crate::loader::tensors::Tensors;
use crate::{ModelConfig, Result};
use cresset_kernels::Compute;
use cresset_kernels::activation::{Activation, gated};
use cresset_kernels::linear::linear;

pub struct Mlp<S: Store = Host> {
    pub gate_up: S::Matrix,
    pub gate_up_bias: Option<S::Vector>,
    pub down: S::Matrix,
    pub down_bias: Option<S::Vector>,
    pub activation: Activation,
}

impl<S: Store> Mlp<S> {
    /// `prefix` ends with a dot.
    pub fn load(
        t: &mut Tensors<S>,
        prefix: &str,
        config: &ModelConfig,
        recipe: &Recipe,
    ) -> Option<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let name = |part: &str| format!("{prefix}mlp.{part}");
        let gate_up = t
            .stack(&[(&name("gate_proj.weight"), inner), (&name("up_proj.weight"), inner)], hidden);
        let biases = [(&*name("gate_proj.bias"), inner), (&*name("up_proj.bias"), inner)];
        let gate_up_bias = t.bias_if(recipe.mlp_bias, &biases);
        let down = t.matrix(&name("down_proj.weight"), hidden, inner);
        let down_bias = t.bias_if(recipe.mlp_bias, &[(&name("down_proj.bias"), hidden)]);
        Some(Self {
            gate_up: gate_up?,
            gate_up_bias: gate_up_bias?,
            down: down?,
            down_bias: down_bias?,
            activation: recipe.activation,
        })
    }
}

impl Mlp {
    /// `normed` → `delta`.
    pub fn forward(&self, compute: &Compute, w: &Workspace) -> Result<()> {
        linear(compute, &self.gate_up, self.gate_up_bias.as_ref(), &w.normed, &w.gate_up)?;
        gated(compute, self.activation, &w.gate_up, &w.activated)?;
        Ok(linear(compute, &self.down, self.down_bias.as_ref(), &w.activated, &w.delta)?)
    }

    pub fn is_quantised(&self) -> bool {
        self.gate_up.is_quantised() || self.down.is_quantised()
    }

    pub fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }
}
