//! The shape of a decoder, independent of the file format it was read from.

use cresset_kernels::attention::gpu::HeadShape;
use cresset_kernels::experts::{MAX_CHOSEN, MAX_GROUPS};
use cresset_kernels::gpu::Kind;
use cresset_kernels::recurrence::{DeltaShape, ScanShape};
use cresset_kernels::rope::{E4M3, cached};

#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    /// The layer of a head that guesses tokens is the last, if one was loaded.
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub rms_norm_eps: f32,
    pub rope: RopeConfig,
    /// Absolute limit of the model in tokens.
    pub max_positions: usize,
    pub sliding: Option<Sliding>,
    /// Number of trailing layers that reuse an earlier layer's K and V (`num_kv_shared_layers`).
    /// Each reads those of the last other layer that sees as many tokens as it does.
    pub shared_kv_layers: usize,
    /// The layers without keys and values, in models that have some.
    pub recurrent: Option<Recurrent>,
    /// The experts, in models that have some.
    pub mixture: Option<MixtureConfig>,
    /// The sizes of latent attention, in models that have it. Then there is one KV head: the vector
    /// of a token, with the one key that is rotated behind it.
    pub latent: Option<LatentConfig>,
    /// If set, queries grow with their positions.
    pub query_growth: Option<QueryGrowth>,
    /// The layers whose queries and keys are not rotated.
    pub unrotated: Vec<usize>,
    /// The products of Q and K are multiplied by this.
    pub attention_scale: f32,
    /// If set, those products become `cap * tanh(x / cap)`.
    pub attention_softcap: Option<f32>,
    pub logits_softcap: Option<f32>,
    /// Token embeddings are multiplied by this.
    pub embedding_scale: f32,
    /// Logits are multiplied by this, before they are capped.
    pub logits_scale: f32,
    pub tied_embeddings: bool,
    /// The kind in which keys and values are kept. On the CPU it is f32, or f16 beside quantised
    /// weights, whose own rounding is far coarser; on a device it is that of the activations, or
    /// [`E4M3`].
    pub kv_kind: Kind,
}

/// Layers whose MLP is a mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MixtureConfig {
    pub experts: usize,
    /// The number of experts that are chosen for a token.
    pub chosen: usize,
    /// The width of an expert between its matrices.
    pub intermediate_size: usize,
    pub scoring: RouterScoring,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalise: bool,
    /// By which they are then multiplied.
    pub scale: f32,
    /// An expert that computes every token, if there is one.
    pub shared: Option<SharedConfig>,
    /// For each layer of the model, whether it has experts.
    pub layers: Vec<bool>,
}

/// Attention whose keys and values are computed from one short vector a token. DeepSeek-AI 2024,
/// "DeepSeek-V2".
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentConfig {
    /// The length of the vector from which queries are computed; `None`: from the layer's input.
    pub query_rank: Option<usize>,
    /// The length of the vector from which keys and values are computed.
    pub rank: usize,
    /// The values of a head's query that are not rotated, and those that are.
    pub plain: usize,
    pub rotated: usize,
    /// The values that a head results in.
    pub value: usize,
}

/// Queries at position p are multiplied by `1 + beta * ln(1 + floor(p / length))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    pub beta: f32,
    pub length: usize,
}

/// The weights of experts, by which they are chosen too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScoring {
    /// The softmax of the router's scores.
    Softmax,
    /// The same. Experts are chosen in the best `kept` of `groups` groups.
    GroupedSoftmax { groups: usize, kept: usize },
    /// Their sigmoids. Experts are chosen by the sums of these and of biases, in the best `kept` of
    /// `groups` groups.
    Sigmoid { groups: usize, kept: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedConfig {
    /// The width of the expert between its matrices.
    pub width: usize,
    /// Whether its result is multiplied by the sigmoid of a score of its own.
    pub gated: bool,
}

/// Layers that carry a state of fixed size from token to token, in place of keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Recurrent {
    pub kind: RecurrentKind,
    /// For each layer of the model, whether it is one of them.
    pub layers: Vec<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RecurrentKind {
    /// A gated convolution of `taps` taps, over the hidden size.
    ShortConv { taps: usize },
    /// The gated delta rule, over the results of a convolution of `taps` taps.
    DeltaRule { shape: DeltaShape, taps: usize },
    /// The selective scan, over the same.
    SelectiveScan(ScanConfig),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScanConfig {
    pub shape: ScanShape,
    /// The taps of the convolution, and whether it has biases.
    pub taps: usize,
    pub conv_bias: bool,
    /// The least step and the largest.
    pub step_limits: [f32; 2],
    /// The epsilon of the norm of the results.
    pub norm_eps: f32,
}

/// Layers whose queries see only the most recent tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Sliding {
    /// Tokens that a query sees, itself included.
    pub window: usize,
    /// For each layer of the model, whether its window slides.
    pub layers: Vec<bool>,
    /// Their rotation, if it differs from the model's.
    pub rope: Option<RopeConfig>,
    /// Their heads, if they differ from the model's.
    pub heads: Option<KvHeads>,
}

/// The heads of a layer's K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHeads {
    pub count: usize,
    /// The values of each, and of each head of Q.
    pub dim: usize,
}

impl KvHeads {
    pub(crate) fn width(self) -> usize {
        self.count * self.dim
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    pub theta: f32,
    pub rotary_dim: usize,
    pub scaling: RopeScaling,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    Linear {
        factor: f32,
    },
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_max_positions: usize,
    },
    /// "NTK": beyond the training length, the base grows with the length of the sequence.
    Dynamic {
        factor: f32,
        original_max_positions: usize,
    },
    Yarn(Yarn),
    /// Per-frequency divisors, `[rotary_dim / 2]`: `long` is used if more than
    /// `original_max_positions` are served.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        attention_factor: f32,
        original_max_positions: usize,
    },
    /// Per-frequency divisors as GGUF's `rope_freqs.weight` gives them, `[rotary_dim / 2]`.
    Factors(Vec<f32>),
}

/// Peng et al. 2023, "YaRN".
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f32,
    /// The rotated vectors are lengthened by this factor.
    pub attention_factor: f32,
    /// A frequency is kept if it turns more often than `beta_fast` over the original length, and
    /// divided if it turns less often than `beta_slow`.
    pub beta_fast: f32,
    pub beta_slow: f32,
    pub original_max_positions: usize,
    /// Whether the range between the two is widened to whole dimensions.
    pub truncate: bool,
    /// How much latent attention is sharpened: see `Yarn::sharpening`.
    pub mscale_all_dim: f32,
}

impl Yarn {
    /// The factor of the scores of latent attention.
    pub(crate) fn sharpening(&self) -> f32 {
        let longer = 0.1 * self.mscale_all_dim * self.factor.max(1.0).ln() + 1.0;
        longer * longer
    }
}

impl ModelConfig {
    /// Adds the layer of a head that guesses tokens: it has attention, and experts in models that
    /// have some.
    pub(crate) fn add_guess_layer(&mut self) {
        self.layers += 1;
        if let Some(recurrent) = &mut self.recurrent {
            recurrent.layers.push(false);
        }
        if let Some(mixture) = &mut self.mixture {
            mixture.layers.push(true);
        }
    }

    /// Bytes of one block of the KV cache over all layers with attention, K and V.
    pub fn kv_block_bytes(&self, block_size: usize) -> usize {
        self.attention_layers() * self.kv_bytes(self.kv_width(), block_size)
    }

    /// Bytes of the K and V of one layer for `tokens` tokens, where K has `width` elements of each.
    /// Latent attention has one vector for both.
    pub(crate) fn kv_bytes(&self, width: usize, tokens: usize) -> usize {
        let caches = if self.latent.is_some() { 1 } else { 2 };
        caches * width * tokens * self.kv_kind.bytes()
    }

    /// The elements that K has of one token, in the layers where it has most.
    pub(crate) fn kv_width(&self) -> usize {
        let sliding = self.sliding.as_ref().and_then(|sliding| sliding.heads);
        let model = KvHeads { count: self.kv_heads, dim: self.head_dim };
        self.cached(model).max(sliding.map_or(0, |heads| self.cached(heads)))
    }

    /// The elements of a place in which layers with a window and layers without one keep their K of
    /// a token: the least of which each kind's are a whole part.
    pub(crate) fn place_width(&self) -> usize {
        let model = self.cached(KvHeads { count: self.kv_heads, dim: self.head_dim });
        let sliding = self.sliding.as_ref().and_then(|sliding| sliding.heads);
        let sliding = sliding.map_or(model, |heads| self.cached(heads));
        let (mut divisor, mut rest) = (model, sliding);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        model / divisor * sliding
    }

    /// The elements that K of such heads takes in the cache for one token.
    pub(crate) fn cached(&self, heads: KvHeads) -> usize {
        cached(self.kv_kind, heads.count, heads.dim)
    }

    /// The heads of a layer's K and V, also where it reads another's.
    pub(crate) fn kv_heads_of(&self, layer: usize) -> KvHeads {
        let sliding = self.sliding.as_ref().filter(|sliding| sliding.layers[layer]);
        let model = KvHeads { count: self.kv_heads, dim: self.head_dim };
        sliding.and_then(|sliding| sliding.heads).unwrap_or(model)
    }

    /// The heads of a layer's attention.
    pub(crate) fn head_shape(&self, layer: usize) -> HeadShape {
        let KvHeads { count: kv_heads, dim: head_dim } = self.kv_heads_of(layer);
        let value_prefix = self.latent.map(|latent| latent.rank);
        let e4m3 = self.kv_kind == E4M3;
        HeadShape { heads: self.heads, kv_heads, head_dim, value_prefix, e4m3 }
    }

    /// The layer whose K and V a layer reads, if it has none of its own.
    pub(crate) fn donor(&self, layer: usize) -> Option<usize> {
        let first = self.layers - self.shared_kv_layers;
        let slides = |layer: usize| self.sliding.as_ref().is_some_and(|s| s.layers[layer]);
        let own = (0..first).rev().find(|own| slides(*own) == slides(layer));
        own.filter(|_| layer >= first)
    }

    /// The number of layers with keys and values.
    pub(crate) fn attention_layers(&self) -> usize {
        (0..self.layers).filter(|layer| self.recurrence(*layer).is_none()).count()
    }

    /// What a layer has in place of attention, if it is recurrent.
    pub(crate) fn recurrence(&self, layer: usize) -> Option<RecurrentKind> {
        self.recurrent.as_ref().filter(|recurrent| recurrent.layers[layer]).map(|r| r.kind)
    }

    /// Bytes of the state of one sequence, over all recurrent layers.
    pub fn state_bytes(&self) -> usize {
        let layers = self.layers - self.attention_layers();
        self.recurrent.as_ref().map_or(0, |recurrent| {
            let values: usize = recurrent.kind.state_lens(self.hidden_size).iter().sum();
            layers * values * Kind::F32.bytes()
        })
    }
}

impl RecurrentKind {
    /// The values of a layer's state: the last inputs of its convolution, and its memory.
    pub(crate) fn state_lens(self, hidden_size: usize) -> [usize; 2] {
        match self {
            Self::ShortConv { taps } => [(taps - 1) * hidden_size, 0],
            Self::DeltaRule { shape, taps } => [(taps - 1) * shape.width(), shape.state_len()],
            Self::SelectiveScan(ScanConfig { shape, taps, .. }) => {
                [(taps - 1) * shape.width(), shape.state_len()]
            }
        }
    }
}

impl Sliding {
    /// A window in each of `layers` layers.
    pub(crate) fn everywhere(window: usize, layers: usize) -> Self {
        Self { window, layers: vec![true; layers], rope: None, heads: None }
    }
}

/// Limits that are several times the largest of any published model. They bound what a damaged
/// config can make the loader allocate.
const MAX_WIDTH: usize = 1 << 22;
const MAX_LAYERS: usize = 1 << 10;
const MAX_EXPERTS: usize = 1 << 12;
const MAX_POSITIONS: usize = 1 << 26;
const MAX_TAPS: usize = 64;
const MAX_STATE_SIZE: usize = 1 << 12;

impl ModelConfig {
    /// Checks the relations between the sizes that the forward pass relies on.
    pub(crate) fn check(&self) -> Result<(), String> {
        let widths = [
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.heads,
            self.kv_heads,
            self.head_dim,
        ];
        let sound = widths.iter().all(|width| (1..=MAX_WIDTH).contains(width))
            && (1..=MAX_LAYERS).contains(&self.layers)
            && (1..=MAX_POSITIONS).contains(&self.max_positions);
        if !sound {
            return Err("the config has a size of zero, or one beyond any model's".into());
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} heads cannot share {} KV heads", self.heads, self.kv_heads));
        }
        let factors =
            [self.rms_norm_eps, self.attention_scale, self.embedding_scale, self.logits_scale];
        let caps = [self.attention_softcap, self.logits_softcap];
        if !factors.into_iter().chain(caps.into_iter().flatten()).all(positive) {
            return Err("the norm's epsilon, the scales and the soft caps must be positive".into());
        }
        if let Some(sliding) = &self.sliding {
            if sliding.window == 0 || sliding.layers.len() != self.layers {
                return Err(format!(
                    "a window of {} tokens over {} of {} layers",
                    sliding.window,
                    sliding.layers.len(),
                    self.layers
                ));
            }
            let dim = sliding.heads.map_or(self.head_dim, |heads| heads.dim);
            sliding.rope.iter().try_for_each(|rope| rope.check(dim))?;
            self.check_sliding_heads(sliding.heads)?;
        }
        self.check_shared_kv()?;
        self.mixture.iter().try_for_each(|mixture| mixture.check(self.layers))?;
        self.recurrent.iter().try_for_each(|recurrent| recurrent.check(self))?;
        self.latent.iter().try_for_each(|latent| latent.check(self))?;
        self.query_growth.iter().try_for_each(QueryGrowth::check)?;
        self.rope.check(self.head_dim)
    }
}

impl ModelConfig {
    fn check_sliding_heads(&self, heads: Option<KvHeads>) -> Result<(), String> {
        let Some(heads) = heads else { return Ok(()) };
        let sizes = [heads.count, heads.dim];
        let sound = sizes.iter().all(|size| (1..=MAX_WIDTH).contains(size))
            && self.heads.is_multiple_of(heads.count);
        if sound {
            return Ok(());
        }
        Err(format!("{} heads cannot share {heads:?} of a window", self.heads))
    }

    /// Each of the last layers must have one to read from.
    fn check_shared_kv(&self) -> Result<(), String> {
        let shared = self.shared_kv_layers;
        let first = self.layers.saturating_sub(shared);
        if shared <= self.layers && (first..self.layers).all(|layer| self.donor(layer).is_some()) {
            return Ok(());
        }
        Err(format!("the last {shared} of {} layers find no K and V to read", self.layers))
    }
}

impl Recurrent {
    fn check(&self, config: &ModelConfig) -> Result<(), String> {
        let (taps, sizes, divides) = match self.kind {
            RecurrentKind::ShortConv { taps } => (taps, [1; 4], true),
            RecurrentKind::DeltaRule { shape, taps } => {
                let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = shape;
                let divides = key_heads > 0 && value_heads.is_multiple_of(key_heads);
                (taps, [key_heads, value_heads, key_dim, value_dim], divides)
            }
            RecurrentKind::SelectiveScan(ScanConfig {
                shape, taps, step_limits, norm_eps, ..
            }) => {
                let ScanShape { heads, head_dim, groups, state_dim } = shape;
                let [least, most] = step_limits;
                let divides = groups > 0 && heads.is_multiple_of(groups);
                let fits = divides && least <= most && positive(norm_eps);
                (taps, [heads, head_dim, groups, state_dim], fits)
            }
        };
        let sound = (2..=MAX_TAPS).contains(&taps)
            && divides
            && sizes.iter().all(|size| (1..=MAX_STATE_SIZE).contains(size));
        if !sound {
            return Err(format!("recurrent layers of {:?}", self.kind));
        }
        if self.layers.len() != config.layers {
            return Err("the config does not say which layers have attention".into());
        }
        if config.sliding.is_some() {
            return Err("windows beside recurrent layers are not supported".into());
        }
        Ok(())
    }
}

impl LatentConfig {
    fn check(&self, config: &ModelConfig) -> Result<(), String> {
        let &Self { query_rank, rank, plain, rotated, value } = self;
        let sizes = [query_rank.unwrap_or(1), rank, plain, rotated, value];
        let sound = sizes.iter().all(|size| (1..=MAX_WIDTH).contains(size))
            && rotated == config.rope.rotary_dim
            && config.kv_heads == 1
            && config.head_dim == rank + rotated;
        if sound { Ok(()) } else { Err(format!("latent attention of the sizes {self:?}")) }
    }
}

impl QueryGrowth {
    fn check(&self) -> Result<(), String> {
        if self.beta >= 0.0 && self.length > 0 {
            return Ok(());
        }
        Err(format!("queries cannot grow by {self:?}"))
    }
}

impl RouterScoring {
    fn check(self, experts: usize, chosen: usize) -> Result<(), String> {
        let (Self::Sigmoid { groups, kept } | Self::GroupedSoftmax { groups, kept }) = self else {
            return Ok(());
        };
        let fits = (1..=groups.min(MAX_GROUPS)).contains(&kept)
            && experts.is_multiple_of(groups)
            && experts / groups * kept >= chosen;
        let refuse = || {
            format!(
                "{chosen} of {experts} experts in {kept} of {groups} groups, of which at most \
                 {MAX_GROUPS} can be"
            )
        };
        if fits { Ok(()) } else { Err(refuse()) }
    }
}

impl MixtureConfig {
    fn check(&self, layers: usize) -> Result<(), String> {
        let &Self { experts, chosen, intermediate_size, shared, .. } = self;
        let widths = [intermediate_size, shared.map_or(1, |shared| shared.width)];
        self.scoring.check(experts, chosen)?;
        if !positive(self.scale) {
            return Err("the factor of the experts' weights must be positive".into());
        }
        let sound = (1..=MAX_EXPERTS).contains(&experts)
            && (1..=experts.min(MAX_CHOSEN)).contains(&chosen)
            && widths.iter().all(|width| (1..=MAX_WIDTH).contains(width))
            && self.layers.len() == layers;
        if sound {
            return Ok(());
        }
        Err(format!(
            "{chosen} of {experts} experts of a width of {intermediate_size} are chosen, where at \
             most {MAX_CHOSEN} of {MAX_EXPERTS} can be"
        ))
    }
}

fn positive(number: f32) -> bool {
    number.is_finite() && number > 0.0
}

impl RopeConfig {
    fn check(&self, head_dim: usize) -> Result<(), String> {
        let dim = self.rotary_dim;
        if dim > head_dim || !dim.is_multiple_of(2) {
            return Err(format!("a rotary dimension of {dim} does not fit heads of {head_dim}"));
        }
        let numbers = match &self.scaling {
            RopeScaling::None => vec![],
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor, .. } => vec![*factor],
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, .. } => {
                vec![*factor, *low_freq_factor, high_freq_factor - low_freq_factor]
            }
            RopeScaling::Yarn(y) => vec![y.factor, y.attention_factor, y.beta_fast, y.beta_slow],
            RopeScaling::LongRope { short, long, attention_factor, .. } => {
                if [short, long].iter().any(|factors| factors.len() != dim / 2) {
                    return Err(format!(
                        "RoPE needs {} short and long factors for a dimension of {dim}",
                        dim / 2
                    ));
                }
                [&[*attention_factor], &short[..], long].concat()
            }
            RopeScaling::Factors(factors) => factors.clone(),
        };
        if positive(self.theta) && numbers.into_iter().all(positive) {
            return Ok(());
        }
        Err("the RoPE base and the numbers of its scaling must be positive".into())
    }
}
