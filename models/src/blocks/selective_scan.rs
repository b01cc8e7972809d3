//! The selective scan after a short convolution. Dao and Gu 2024, "Mamba-2".

use crate::Result;
use crate::config::ScanConfig;
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use cresset_kernels::Ops;
use cresset_kernels::recurrence::{
    ConvForm, GateOrder, GatedNormArgs, ScanShape, SelectiveScanArgs, ShortConvArgs,
};

pub struct SelectiveScan<O: Ops> {
    config: ScanConfig,
    /// `[heads * head_dim, hidden]`: the gate of the results.
    gate: O::Matrix,
    /// `[shape.width(), hidden]`: what is convolved.
    xbc: O::Matrix,
    /// `[heads, hidden]`: how much a token writes, and how much it keeps.
    steps: O::Matrix,
    /// `[taps, shape.width()]`
    taps: O::Buffer,
    /// `[shape.width()]`
    conv_bias: Option<O::Buffer>,
    /// `[heads]` each
    decay: O::Buffer,
    step_bias: O::Buffer,
    skip: O::Buffer,
    /// `[heads * head_dim]`
    norm: O::Buffer,
    output: O::Matrix,
    /// `[tokens, shape.width()]` each
    projected: Activations<O>,
    convolved: Activations<O>,
    /// `[tokens, heads]`
    step_values: Activations<O>,
    /// `[tokens, heads * head_dim]` each
    read: Activations<O>,
    gates: Activations<O>,
    normed: Activations<O>,
    /// `[logits rows, heads * head_dim]`
    selected: Activations<O>,
}

impl<O: Ops> SelectiveScan<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str, config: ScanConfig) -> Option<Self> {
        let ScanShape { heads, head_dim, .. } = config.shape;
        let (width, inner) = (config.shape.width(), heads * head_dim);
        let hidden = l.spec.config.hidden_size;
        let name = |part: &str| format!("{prefix}mamba.{part}");
        let t = &mut *l.tensors;
        let input = t.split(&name("in_proj.weight"), [inner, width, heads], hidden);
        let taps = t.taps(&name("conv1d.weight"), width, config.taps);
        let conv_bias = if config.conv_bias {
            t.vector(&name("conv1d.bias"), width, |x| x).map(Some)
        } else {
            Some(None)
        };
        let rate = |x: f32| if config.stores_rate { x } else { -x.exp() };
        let decay = t.vector(&name("A_log"), heads, rate);
        let step_bias = t.vector(&name("dt_bias"), heads, |x| x);
        let skip = t.vector(&name("D"), heads, |x| x);
        let norm = t.vector(&name("norm.weight"), inner, |x| x);
        let output = t.matrix(&name("out_proj.weight"), hidden, inner);
        let ([gate, xbc, steps], taps, conv_bias) = (input?, taps?, conv_bias?);
        let (decay, step_bias, skip) = (decay?, step_bias?, skip?);
        let (norm, output) = (norm?, output?);
        Some(Self {
            config,
            gate,
            xbc,
            steps,
            taps,
            conv_bias,
            decay,
            step_bias,
            skip,
            norm,
            output,
            projected: l.rows("scan input", width)?,
            convolved: l.rows("scan input convolved", width)?,
            step_values: l.rows("scan steps", heads)?,
            read: l.rows("scan results", inner)?,
            gates: l.rows("scan gates", inner)?,
            normed: l.rows("scan results normed", inner)?,
            selected: l.selected_rows("scan results selected", inner)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`, with the sequences' states in the cache.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        self.remember(s, x)?;
        if s.ends_here(x) {
            return Ok(());
        }
        let [gate, normed] = [&self.gates, &self.normed].map(|rows| rows.first(x.rows()));
        s.linear(&self.gate, None, x.input(), gate)?;
        s.ops.gated_norm(&GatedNormArgs {
            order: GateOrder::BeforeNorm,
            groups: self.config.shape.groups,
            x: self.read.first(x.rows()),
            gate,
            weight: O::view(&self.norm),
            eps: self.config.norm_eps,
            out: normed,
        })?;
        let normed = s.select_rows(x, &self.normed, &self.selected)?;
        s.linear(&self.output, None, normed.first(x.rows()), x.sublayer_out())
    }

    /// `x.input()` → the states in the cache, and what each token reads of its own in `read`.
    fn remember<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let states = s.kv.states_of_layer(s.layer);
        let [projected, convolved, steps] =
            [&self.projected, &self.convolved, &self.step_values].map(|rows| rows.first(x.rows()));
        s.linear(&self.xbc, None, x.input(), projected)?;
        s.ops.short_conv(&ShortConvArgs {
            form: ConvForm::Silu,
            x: projected,
            weight: O::view(&self.taps),
            bias: self.conv_bias.as_ref().map(O::view),
            width: self.projected.width,
            states: states.conv,
            moves: s.states(),
            out: convolved,
        })?;
        s.linear(&self.steps, None, x.input(), steps)?;
        Ok(s.ops.selective_scan(&SelectiveScanArgs {
            shape: self.config.shape,
            xbc: convolved,
            steps,
            decay: O::view(&self.decay),
            step_bias: O::view(&self.step_bias),
            skip: O::view(&self.skip),
            step_limits: self.config.step_limits,
            states: states.memory,
            moves: s.states(),
            out: self.read.first(x.rows()),
        })?)
    }
}
