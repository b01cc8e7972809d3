//! A gated short convolution. Liquid AI 2025, LFM2.

use crate::Result;
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use cresset_kernels::Ops;
use cresset_kernels::recurrence::{ConvForm, ShortConvArgs};

pub struct ShortConv<O: Ops> {
    /// `[3 * hidden, hidden]`: the gate before the convolution, the one after it, the values.
    input: O::Matrix,
    /// `[taps, hidden]`
    taps: O::Buffer,
    output: O::Matrix,
    /// `[tokens, 3 * hidden]`
    projected: Activations<O>,
    /// `[tokens, hidden]`
    convolved: Activations<O>,
    /// `[logits rows, hidden]`
    selected: Activations<O>,
}

impl<O: Ops> ShortConv<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, prefix: &str, taps: usize) -> Option<Self> {
        let hidden = l.spec.config.hidden_size;
        let name = |part: &str| format!("{prefix}conv.{part}.weight");
        let t = &mut *l.tensors;
        let input = t.matrix(&name("in_proj"), 3 * hidden, hidden);
        let taps = t.taps(&name("conv"), hidden, taps);
        let output = t.matrix(&name("out_proj"), hidden, hidden);
        let (input, taps, output) = (input?, taps?, output?);
        Some(Self {
            input,
            taps,
            output,
            projected: l.rows("convolution input", 3 * hidden)?,
            convolved: l.rows("convolution results", hidden)?,
            selected: l.selected_rows("convolution results selected", hidden)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`, with the sequences' states in the cache.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        let projected = self.projected.first(x.rows());
        s.whole_linear(&self.input, None, x.input(), projected)?;
        s.ops.short_conv(&ShortConvArgs {
            form: ConvForm::Gated,
            x: projected,
            weight: O::view(&self.taps),
            bias: None,
            width: self.convolved.width,
            states: s.kv.states_of_layer(s.layer).conv,
            moves: s.states(),
            out: self.convolved.first(x.rows()),
        })?;
        if s.ends_here(x) {
            return Ok(());
        }
        let convolved = s.select_rows(x, &self.convolved, &self.selected)?;
        s.whole_linear(&self.output, None, convolved.first(x.rows()), x.sublayer_out())
    }
}
