//! The arguments of recurrences.

use crate::Result;
use crate::error::ensure;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};

pub(super) const CONV: &str = "short_conv";
pub(super) const DELTA: &str = "delta_rule";
pub(super) const SCAN: &str = "selective_scan";
pub(super) const NORM: &str = "gated_norm";

/// In place of a slot: the sequence begins, with a state of zeros.
pub const NO_STATE: u32 = u32::MAX;

/// The state that each sequence of a step goes on from, and the slot that gets its new one. A state
/// that is not written over stays as it was, so others can go on from it later.
///
/// On the CPU a sequence may be cut into parts, each of which reads the slot that the part before
/// it wrote: so the states between its tokens are kept too.
#[derive(Clone, Copy, Debug)]
pub struct StateMoves<V: Operand> {
    /// `[sequences + 1]`: sequence i has the rows `starts[i]..starts[i + 1]`, at least one.
    pub starts: V::Indices,
    /// `[sequences]` slots, or [`NO_STATE`].
    pub reads: V::Indices,
    /// `[sequences]` slots. Each is written by one sequence, and read by no other than the next
    /// part of the same.
    pub writes: V::Indices,
}

impl<V: Operand> StateMoves<V> {
    fn check(&self, op: &'static str) -> Result<()> {
        let &Self { starts, reads, writes } = self;
        let sequences = V::count(reads);
        let fits = sequences.is_some()
            && V::count(writes) == sequences
            && V::count(starts) == sequences.map(|count| count + 1);
        ensure(op, fits, || format!("{starts:?} for states read from {reads:?} to {writes:?}"))
    }
}

/// What happens around a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvForm {
    /// A row is what is convolved; the result goes through SiLU.
    Silu,
    /// A row is three parts: the values are multiplied by the first part before the convolution,
    /// and its results by the second. The third part are the values.
    Gated,
}

impl ConvForm {
    /// The number of parts of a row of `x`.
    pub fn parts(self) -> usize {
        match self {
            Self::Silu => 1,
            Self::Gated => 3,
        }
    }
}

/// A causal convolution of each channel with taps of its own: `out[t] = Σ weight[j] · in[t - taps +
/// 1 + j] (+ bias)`, where what is before the sequence's first token is zero.
#[derive(Clone, Copy, Debug)]
pub struct ShortConvArgs<V: Operand> {
    pub form: ConvForm,
    /// `[n, form.parts() * width]` activations.
    pub x: V,
    /// `[taps, width]` f32; the last tap is that of the token itself.
    pub weight: V,
    /// `[width]` f32
    pub bias: Option<V>,
    pub width: usize,
    /// `[slots, taps - 1, width]` f32: what was convolved last, the oldest first.
    pub states: V,
    pub moves: StateMoves<V>,
    /// `[n, width]` of the kind of `x`; it shares no memory with it.
    pub out: V,
}

impl<V: Operand> ShortConvArgs<V> {
    /// Returns the number of taps.
    pub(super) fn check(&self) -> Result<usize> {
        let &Self { form, x, weight, bias, width, states, moves, out } = self;
        let taps = weight.len().checked_div(width).unwrap_or(0);
        let fits = is_activation(x.kind())
            && out.kind() == x.kind()
            && x.len() == form.parts() * out.len()
            && taps > 1
            && weight.len() == taps * width
            && out.len().is_multiple_of(width)
            && states.len().is_multiple_of((taps - 1) * width)
            && bias.is_none_or(|bias| bias.kind() == Kind::F32 && bias.len() == width)
            && [weight, states].iter().all(|v| v.kind() == Kind::F32);
        ensure(CONV, fits, || {
            format!("{x:?}, {weight:?}, {states:?} and {out:?} for {width} channels")
        })?;
        moves.check(CONV)?;
        distinct(CONV, out, &[x, weight, states])?;
        distinct(CONV, states, &[x, weight])?;
        if let Some(bias) = bias {
            distinct(CONV, out, &[bias])?;
            distinct(CONV, states, &[bias])?;
        }
        Ok(taps)
    }
}

/// Which key head a value head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadMap {
    /// Neighbouring value heads share a key head.
    Grouped,
    /// Value head h has key head `h % key_heads`: the order in GGUF files.
    Tiled,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    pub key_heads: usize,
    /// A multiple of `key_heads`.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    pub head_map: HeadMap,
}

impl DeltaShape {
    /// Values of a row of queries, keys and values.
    pub fn width(self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Values of a sequence's state.
    pub fn state_len(self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// The key head of a value head.
    pub fn key_head(self, value_head: usize) -> usize {
        match self.head_map {
            HeadMap::Grouped => value_head / (self.value_heads / self.key_heads),
            HeadMap::Tiled => value_head % self.key_heads,
        }
    }
}

/// The gated delta rule, token by token, for each value head with a state S `[key_dim, value_dim]`:
///
/// ```text
/// q = q / √(Σq² + 1e-6) / √key_dim,  k = k / √(Σk² + 1e-6)
/// S = exp(decay · softplus(a + decay_bias)) · S
/// S = S + k ⊗ (sigmoid(b) · (v - Sᵀk))
/// out = Sᵀq
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DeltaRuleArgs<V: Operand> {
    pub shape: DeltaShape,
    /// `[n, shape.width()]` activations: the queries of all key heads, their keys, all values.
    pub qkv: V,
    /// `[n, 2 * value_heads]` of the same kind: b of all value heads, then a.
    pub gates: V,
    /// `[value_heads]` f32, none above zero.
    pub decay: V,
    /// `[value_heads]` f32.
    pub decay_bias: V,
    /// `[slots, value_heads, key_dim, value_dim]` f32.
    pub states: V,
    pub moves: StateMoves<V>,
    /// `[n, value_heads * value_dim]` of the kind of `qkv`; it shares no memory with anything else.
    pub out: V,
}

impl<V: Operand> DeltaRuleArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { shape, qkv, gates, decay, decay_bias, states, moves, out } = self;
        let DeltaShape { key_heads, value_heads, value_dim, .. } = shape;
        let sound = shape.state_len() > 0 && key_heads > 0 && value_heads.is_multiple_of(key_heads);
        let rows = out.len().checked_div(value_heads * value_dim).unwrap_or(0);
        let fits = sound
            && is_activation(qkv.kind())
            && [gates, out].iter().all(|v| v.kind() == qkv.kind())
            && qkv.len() == rows * shape.width()
            && gates.len() == rows * 2 * value_heads
            && out.len() == rows * value_heads * value_dim
            && [decay, decay_bias].iter().all(|v| v.len() == value_heads)
            && states.len().is_multiple_of(shape.state_len())
            && [decay, decay_bias, states].iter().all(|v| v.kind() == Kind::F32);
        ensure(DELTA, fits, || {
            format!("{qkv:?}, {gates:?}, {decay:?}, {decay_bias:?}, {states:?}, {out:?}: {shape:?}")
        })?;
        moves.check(DELTA)?;
        distinct(DELTA, out, &[qkv, gates, decay, decay_bias, states])?;
        distinct(DELTA, states, &[qkv, gates, decay, decay_bias])
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    /// A multiple of `groups`: neighbouring heads share what they read and write by.
    pub heads: usize,
    pub head_dim: usize,
    pub groups: usize,
    pub state_dim: usize,
}

impl ScanShape {
    /// Values of a row: those of all heads, and for each group two vectors.
    pub fn width(self) -> usize {
        self.heads * self.head_dim + 2 * self.groups * self.state_dim
    }

    /// Values of a sequence's state.
    pub fn state_len(self) -> usize {
        self.heads * self.head_dim * self.state_dim
    }
}

/// The state space model of Mamba-2 (Dao and Gu 2024), token by token, for each head with a state S
/// `[state_dim, head_dim]`:
///
/// ```text
/// step = clamp(softplus(step + step_bias), step_limits)
/// S = exp(decay · step) · S + b ⊗ (step · x)
/// out = Sᵀc + skip · x
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SelectiveScanArgs<V: Operand> {
    pub shape: ScanShape,
    /// `[n, shape.width()]` activations: x of all heads, b of all groups, c of all groups.
    pub xbc: V,
    /// `[n, heads]` of the same kind.
    pub steps: V,
    /// `[heads]` f32, none above zero.
    pub decay: V,
    /// `[heads]` f32 each.
    pub step_bias: V,
    pub skip: V,
    /// The least step and the largest.
    pub step_limits: [f32; 2],
    /// `[slots, heads, state_dim, head_dim]` f32.
    pub states: V,
    pub moves: StateMoves<V>,
    /// `[n, heads * head_dim]` of the kind of `xbc`; it shares no memory with anything else.
    pub out: V,
}

impl<V: Operand> SelectiveScanArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { shape, xbc, steps, decay, step_bias, skip, states, moves, out, .. } = self;
        let ScanShape { heads, head_dim, groups, .. } = shape;
        let [least, most] = self.step_limits;
        let sound = shape.state_len() > 0 && groups > 0 && heads.is_multiple_of(groups);
        let rows = out.len().checked_div(heads * head_dim).unwrap_or(0);
        let fits = sound
            && least <= most
            && is_activation(xbc.kind())
            && [steps, out].iter().all(|v| v.kind() == xbc.kind())
            && xbc.len() == rows * shape.width()
            && steps.len() == rows * heads
            && out.len() == rows * heads * head_dim
            && [decay, step_bias, skip].iter().all(|v| v.len() == heads)
            && states.len().is_multiple_of(shape.state_len())
            && [decay, step_bias, skip, states].iter().all(|v| v.kind() == Kind::F32);
        ensure(SCAN, fits, || {
            format!("{xbc:?}, {steps:?}, {decay:?}, {states:?}, {out:?}: {shape:?}")
        })?;
        moves.check(SCAN)?;
        distinct(SCAN, out, &[xbc, steps, decay, step_bias, skip, states])?;
        distinct(SCAN, states, &[xbc, steps, decay, step_bias, skip])
    }
}

/// When a gate multiplies what is normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateOrder {
    /// `out = rms_norm(x) * weight * silu(gate)`
    AfterNorm,
    /// `out = rms_norm(x * silu(gate)) * weight`
    BeforeNorm,
}

/// A norm and a gate of each row of the width of `weight`.
#[derive(Clone, Copy, Debug)]
pub struct GatedNormArgs<V> {
    pub order: GateOrder,
    /// So many equal parts of a row are normed each on its own.
    pub groups: usize,
    /// `[n, width]` activations.
    pub x: V,
    /// `[n, width]` of the same kind.
    pub gate: V,
    /// `[width]` f32.
    pub weight: V,
    pub eps: f32,
    /// `[n, width]`; it shares no memory with anything else.
    pub out: V,
}

impl<V: Operand> GatedNormArgs<V> {
    pub(super) fn check(&self) -> Result<()> {
        let &Self { groups, x, gate, weight, out, .. } = self;
        let like_x = |other: V| other.len() == x.len() && other.kind() == x.kind();
        let fits = is_activation(x.kind())
            && weight.kind() == Kind::F32
            && !weight.is_empty()
            && groups > 0
            && weight.len().is_multiple_of(groups)
            && x.len().is_multiple_of(weight.len())
            && like_x(gate)
            && like_x(out);
        ensure(NORM, fits, || {
            format!("{x:?}, {gate:?} and {out:?} for {groups} groups of {} values", weight.len())
        })?;
        distinct(NORM, out, &[x, gate, weight])
    }
}
