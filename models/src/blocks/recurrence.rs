//! A recurrence after a short convolution: the gated delta rule (Yang et al. 2024, "Gated Delta
//! Networks") or the selective scan (Dao and Gu 2024, "Mamba-2").

use crate::Result;
use crate::config::ScanConfig;
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use cresset_kernels::Ops;
use cresset_kernels::recurrence::{
    ConvForm, DeltaRuleArgs, DeltaShape, GateOrder, GatedNormArgs, ScanShape, SelectiveScanArgs,
    ShortConvArgs,
};

pub struct RecurrentMixer<O: Ops> {
    rule: Rule<O>,
    /// `[inner, hidden]`: the gate of the results.
    gate: O::Matrix,
    /// `[width, hidden]`: what is convolved.
    input: O::Matrix,
    /// `[rates, hidden]`: how much a token writes, and how much it keeps.
    rates: O::Matrix,
    /// `[taps, width]`
    taps: O::Buffer,
    /// `[width]`
    conv_bias: Option<O::Buffer>,
    /// `[heads]` each: how fast a head forgets, and a bias of that.
    decay: O::Buffer,
    decay_bias: O::Buffer,
    /// `[inner]`, or one weight for each value of a head.
    norm: O::Buffer,
    output: O::Matrix,
    /// `[tokens, width]` each
    projected: Activations<O>,
    convolved: Activations<O>,
    /// `[tokens, rates]`
    rate_values: Activations<O>,
    /// `[tokens, inner]` each
    read: Activations<O>,
    gates: Activations<O>,
    normed: Activations<O>,
    /// `[logits rows, inner]`
    selected: Activations<O>,
}

/// The op over what was convolved, and what it alone has.
enum Rule<O: Ops> {
    Delta(DeltaShape),
    Scan {
        config: ScanConfig,
        /// `[heads]`: how much a head's own values count.
        skip: O::Buffer,
    },
}

/// The sizes of a recurrence, and how its file stores it.
struct Form {
    heads: usize,
    width: usize,
    rates: usize,
    inner: usize,
    taps: usize,
    conv_bias: bool,
    norm: usize,
}

impl<O: Ops> RecurrentMixer<O> {
    /// The gated delta rule. `prefix` ends with a dot.
    pub fn delta_rule(
        l: &mut LayerLoader<O>,
        prefix: &str,
        shape: DeltaShape,
        taps: usize,
    ) -> Option<Self> {
        let DeltaShape { value_heads: heads, value_dim: norm, .. } = shape;
        let (width, inner) = (shape.width(), heads * norm);
        let module = format!("{prefix}linear_attn.");
        let matrices = delta_matrices(l, &module, shape);
        let (rates, conv_bias) = (2 * heads, false);
        let form = Form { heads, width, rates, inner, taps, conv_bias, norm };
        Self::load(l, &module, Some(Rule::Delta(shape)), matrices, &form)
    }

    /// The selective scan. `prefix` ends with a dot.
    pub fn selective_scan(
        l: &mut LayerLoader<O>,
        prefix: &str,
        config: ScanConfig,
    ) -> Option<Self> {
        let ScanConfig { shape, taps, conv_bias, .. } = config;
        let ScanShape { heads, head_dim, .. } = shape;
        let (hidden, width, inner) = (l.spec.config.hidden_size, shape.width(), heads * head_dim);
        let module = format!("{prefix}mamba.");
        let (input, sizes) = (format!("{module}in_proj.weight"), [inner, width, heads]);
        let matrices = l.tensors.split(&input, sizes, hidden);
        let matrices = matrices.map_or([None, None, None], |all| all.map(Some));
        let skip = l.tensors.vector(&format!("{module}D"), heads, |x| x);
        let rule = skip.map(|skip| Rule::Scan { config, skip });
        let (rates, norm) = (heads, inner);
        let form = Form { heads, width, rates, inner, taps, conv_bias, norm };
        Self::load(l, &module, rule, matrices, &form)
    }

    /// Loads what both have. `module` ends with a dot.
    fn load(
        l: &mut LayerLoader<O>,
        module: &str,
        rule: Option<Rule<O>>,
        [gate, input, rates]: [Option<O::Matrix>; 3],
        form: &Form,
    ) -> Option<Self> {
        let &Form { heads, width, inner, .. } = form;
        let name = |part: &str| format!("{module}{part}");
        let (t, hidden) = (&mut *l.tensors, l.spec.config.hidden_size);
        let taps = t.taps(&name("conv1d.weight"), width, form.taps);
        let conv_bias = if form.conv_bias {
            t.vector(&name("conv1d.bias"), width, |x| x).map(Some)
        } else {
            Some(None)
        };
        // The converter to GGUF stores the rate in place of its logarithm.
        let stores_rate = t.is_gguf();
        let rate = |x: f32| if stores_rate { x } else { -x.exp() };
        let decay = t.vector(&name("A_log"), heads, rate);
        let decay_bias = t.vector(&name("dt_bias"), heads, |x| x);
        let norm = t.vector(&name("norm.weight"), form.norm, |x| x);
        let output = t.matrix(&name("out_proj.weight"), hidden, inner);
        let (taps, conv_bias, decay, decay_bias) = (taps?, conv_bias?, decay?, decay_bias?);
        let (rule, gate, input, rates) = (rule?, gate?, input?, rates?);
        let (norm, output) = (norm?, output?);
        Some(Self {
            rule,
            gate,
            input,
            rates,
            taps,
            conv_bias,
            decay,
            decay_bias,
            norm,
            output,
            projected: l.rows("recurrence input", width)?,
            convolved: l.rows("recurrence input convolved", width)?,
            rate_values: l.rows("recurrence rates", form.rates)?,
            read: l.rows("recurrence results", inner)?,
            gates: l.rows("recurrence gates", inner)?,
            normed: l.rows("recurrence results normed", inner)?,
            selected: l.selected_rows("recurrence results selected", inner)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`, with the sequences' states in the cache.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        self.remember(s, x)?;
        if s.ends_here(x) {
            return Ok(());
        }
        let [gate, normed] = [&self.gates, &self.normed].map(|rows| rows.first(x.rows()));
        s.whole_linear(&self.gate, None, x.input(), gate)?;
        let (order, groups, eps) = match &self.rule {
            Rule::Delta(_) => (GateOrder::AfterNorm, 1, s.config.rms_norm_eps),
            Rule::Scan { config, .. } => {
                (GateOrder::BeforeNorm, config.shape.groups, config.norm_eps)
            }
        };
        let (read, weight) = (self.read.first(x.rows()), O::view(&self.norm));
        let args = GatedNormArgs { order, groups, x: read, gate, weight, eps, out: normed };
        s.ops.gated_norm(&args)?;
        let normed = s.select_rows(x, &self.normed, &self.selected)?;
        s.whole_linear(&self.output, None, normed.first(x.rows()), x.sublayer_out())
    }

    /// `x.input()` → the states in the cache, and what each token reads of its own in `read`.
    fn remember<'a>(&'a self, s: &LayerStep<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        let (states, rows) = (s.kv.states_of_layer(s.layer), x.rows());
        let [projected, convolved, rates, out] =
            [&self.projected, &self.convolved, &self.rate_values, &self.read]
                .map(|all| all.first(rows));
        s.whole_linear(&self.input, None, x.input(), projected)?;
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
        s.whole_linear(&self.rates, None, x.input(), rates)?;
        let (decay, decay_bias) = (O::view(&self.decay), O::view(&self.decay_bias));
        Ok(match &self.rule {
            &Rule::Delta(shape) => s.ops.delta_rule(&DeltaRuleArgs {
                shape,
                qkv: convolved,
                gates: rates,
                decay,
                decay_bias,
                states: states.memory,
                moves: s.states(),
                out,
            }),
            Rule::Scan { config, skip } => s.ops.selective_scan(&SelectiveScanArgs {
                shape: config.shape,
                xbc: convolved,
                steps: rates,
                decay,
                step_bias: decay_bias,
                skip: O::view(skip),
                step_limits: config.step_limits,
                states: states.memory,
                moves: s.states(),
                out,
            }),
        }?)
    }
}

/// The matrices of a delta rule: the gate's, those of what is convolved, and the rates'. They are
/// tensors of their own, or some share one that has rows of each for every key head.
fn delta_matrices<O: Ops>(
    l: &mut LayerLoader<O>,
    module: &str,
    shape: DeltaShape,
) -> [Option<O::Matrix>; 3] {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
    let (t, hidden, each) = (&mut *l.tensors, l.spec.config.hidden_size, value_heads / key_heads);
    let [qkv, z, b, a, qkvz, ba] =
        ["qkv", "z", "b", "a", "qkvz", "ba"].map(|part| format!("{module}in_proj_{part}.weight"));
    let values = each * value_dim;
    let (input, gate) = if t.has(&qkvz) {
        let parts = [key_dim, key_dim, values, values];
        t.split_heads(&qkvz, key_heads, parts, [3, 1], hidden).map(<_>::from).unzip()
    } else {
        (t.matrix(&qkv, shape.width(), hidden), t.matrix(&z, value_heads * value_dim, hidden))
    };
    let rates = if t.has(&ba) {
        t.split_heads(&ba, key_heads, [each; 2], [2], hidden).map(|[rates]| rates)
    } else {
        t.stack(&[(&b, value_heads), (&a, value_heads)], hidden)
    };
    [gate, input, rates]
}
