//! The gated delta rule after a short convolution. Yang et al. 2024, "Gated Delta Networks".

use crate::Result;
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use cresset_kernels::Ops;
use cresset_kernels::recurrence::{
    ConvForm, DeltaRuleArgs, DeltaShape, GateOrder, GatedNormArgs, HeadMap, ShortConvArgs,
};

pub struct DeltaRule<O: Ops> {
    shape: DeltaShape,
    /// `[shape.width(), hidden]`: queries, keys and values.
    qkv: O::Matrix,
    /// `[taps, shape.width()]`
    taps: O::Buffer,
    /// `[2 * value_heads, hidden]`: how much is written, how much is kept.
    gates: O::Matrix,
    /// `[value_heads]` each
    decay: O::Buffer,
    decay_bias: O::Buffer,
    /// `[value_heads * value_dim, hidden]`: the gate of the results.
    output_gate: O::Matrix,
    /// `[value_dim]`
    norm: O::Buffer,
    output: O::Matrix,
    /// `[tokens, shape.width()]` each
    projected: Activations<O>,
    convolved: Activations<O>,
    /// `[tokens, 2 * value_heads]`
    gate_values: Activations<O>,
    /// `[tokens, value_heads * value_dim]` each
    read: Activations<O>,
    output_gates: Activations<O>,
    normed: Activations<O>,
    /// `[logits rows, value_heads * value_dim]`
    selected: Activations<O>,
}

impl<O: Ops> DeltaRule<O> {
    /// `prefix` ends with a dot.
    pub fn load(
        l: &mut LayerLoader<O>,
        prefix: &str,
        shape: DeltaShape,
        taps: usize,
    ) -> Option<Self> {
        let DeltaShape { value_heads: heads, value_dim, head_map, .. } = shape;
        let (hidden, width, inner) = (l.spec.config.hidden_size, shape.width(), heads * value_dim);
        let name = |part: &str| format!("{prefix}linear_attn.{part}");
        let t = &mut *l.tensors;
        let qkv = t.matrix(&name("in_proj_qkv.weight"), width, hidden);
        let taps = t.taps(&name("conv1d.weight"), width, taps);
        let gates = [name("in_proj_b.weight"), name("in_proj_a.weight")];
        let gates = t.stack(&gates.each_ref().map(|part| (part.as_str(), heads)), hidden);
        // The converter to GGUF, which tiles the heads, stores the rate in place of its logarithm.
        let rate = |x: f32| if head_map == HeadMap::Tiled { x } else { -x.exp() };
        let decay = t.vector(&name("A_log"), heads, rate);
        let decay_bias = t.vector(&name("dt_bias"), heads, |x| x);
        let output_gate = t.matrix(&name("in_proj_z.weight"), inner, hidden);
        let norm = t.vector(&name("norm.weight"), value_dim, |x| x);
        let output = t.matrix(&name("out_proj.weight"), hidden, inner);
        let (qkv, taps, gates, decay, decay_bias) = (qkv?, taps?, gates?, decay?, decay_bias?);
        let (output_gate, norm, output) = (output_gate?, norm?, output?);
        Some(Self {
            shape,
            qkv,
            taps,
            gates,
            decay,
            decay_bias,
            output_gate,
            norm,
            output,
            projected: l.rows("delta rule qkv", width)?,
            convolved: l.rows("delta rule qkv convolved", width)?,
            gate_values: l.rows("delta rule gates", 2 * heads)?,
            read: l.rows("delta rule results", inner)?,
            output_gates: l.rows("delta rule output gates", inner)?,
            normed: l.rows("delta rule results normed", inner)?,
            selected: l.selected_rows("delta rule results selected", inner)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`, with the sequences' states in the cache.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        self.remember(s, x)?;
        if s.ends_here(x) {
            return Ok(());
        }
        let [gate, normed] = [&self.output_gates, &self.normed].map(|rows| rows.first(x.rows()));
        s.linear(&self.output_gate, None, x.input(), gate)?;
        s.ops.gated_norm(&GatedNormArgs {
            order: GateOrder::AfterNorm,
            groups: 1,
            x: self.read.first(x.rows()),
            gate,
            weight: O::view(&self.norm),
            eps: s.config.rms_norm_eps,
            out: normed,
        })?;
        let normed = s.select_rows(x, &self.normed, &self.selected)?;
        s.linear(&self.output, None, normed.first(x.rows()), x.sublayer_out())
    }

    /// `x.input()` → the states in the cache, and what each token reads of its own in `read`.
    fn remember<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let states = s.kv.states_of_layer(s.layer);
        let [projected, convolved, gates] =
            [&self.projected, &self.convolved, &self.gate_values].map(|rows| rows.first(x.rows()));
        s.linear(&self.qkv, None, x.input(), projected)?;
        s.ops.short_conv(&ShortConvArgs {
            form: ConvForm::Silu,
            x: projected,
            weight: O::view(&self.taps),
            bias: None,
            width: self.shape.width(),
            states: states.conv,
            moves: s.states(),
            out: convolved,
        })?;
        s.linear(&self.gates, None, x.input(), gates)?;
        Ok(s.ops.delta_rule(&DeltaRuleArgs {
            shape: self.shape,
            qkv: convolved,
            gates,
            decay: O::view(&self.decay),
            decay_bias: O::view(&self.decay_bias),
            states: states.memory,
            moves: s.states(),
            out: self.read.first(x.rows()),
        })?)
    }
}
