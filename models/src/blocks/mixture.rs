//! A mixture of experts: for each token, a router chooses a few of many MLPs. Fedus et al. 2022,
//! "Switch Transformers"; the shared expert is that of Dai et al. 2024, "DeepSeekMoE".

use super::mlp::{Mlp, MlpNames};
use crate::config::{MixtureConfig, RouterScoring, SharedConfig};
use crate::decoder::{Activations, LayerLoader, LayerStep, Stream};
use crate::planted::{OpFault, argument, in_f32};
use crate::spec::{FusedExperts, Presence};
use crate::{Error, Result};
use cresset_kernels::Ops;
use cresset_kernels::activation::{Activation, GatedArgs};
use cresset_kernels::experts::{
    CombineArgs, ExpertLinearArgs, RouteArgs, RouteScoring, Routes, SharedExpert,
};
use cresset_kernels::factors::ChoiceFactorsArgs;
use cresset_kernels::gpu::Kind;
use cresset_kernels::operand::Operand;

pub struct Mixture<O: Ops> {
    /// `[experts, hidden]`
    router: O::Matrix,
    /// `[experts * 2 * intermediate, hidden]`: for each expert gate, then up.
    gate_up: O::Matrix,
    /// `[experts * hidden, intermediate]`
    down: O::Matrix,
    biases: Option<Biases<O>>,
    shared: Option<Shared<O>>,
    activation: Activation,
    config: MixtureConfig,
    /// `[experts]` f32: biases by which experts are chosen, beside their sigmoids.
    choice_bias: Option<O::Buffer>,
    /// `[experts]` f32: by which the weights of experts are multiplied.
    factors: Option<O::Buffer>,
    /// `[tokens, experts]` f32: the router's results.
    scores: Activations<O>,
    /// `[tokens, chosen]` f32
    weights: Activations<O>,
    /// u32: which experts were chosen. It has room for the plan of each number of tokens.
    plan: Activations<O>,
    /// `[tokens, chosen * 2 * intermediate]`
    projected: Activations<O>,
    /// `[tokens, chosen * intermediate]`
    activated: Activations<O>,
    /// `[tokens, chosen * hidden]`
    results: Activations<O>,
}

/// Each follows the rows of its matrix.
struct Biases<O: Ops> {
    router: O::Buffer,
    gate_up: O::Buffer,
    down: O::Buffer,
}

/// An expert that computes every token, and how much its result counts.
struct Shared<O: Ops> {
    mlp: Mlp<O>,
    gate: Option<SharedGate<O>>,
    /// `[tokens, hidden]`
    result: Activations<O>,
}

struct SharedGate<O: Ops> {
    /// `[1, hidden]`
    weight: O::Matrix,
    /// `[tokens]` f32
    values: Activations<O>,
}

const SHARED: MlpNames = MlpNames {
    module: "mlp.shared_expert",
    projected: "shared expert gate and up",
    activated: "shared expert activated",
};

/// The name of the biases of a router that weighs by sigmoids.
const CHOICE_BIAS: &str = "mlp.gate.e_score_correction_bias";
/// The name of the factors of experts.
const FACTORS: &str = "router.per_expert_scale";

impl<O: Ops> Mixture<O> {
    /// `prefix` ends with a dot.
    pub fn load(l: &mut LayerLoader<O>, config: &MixtureConfig, prefix: &str) -> Option<Self> {
        let &MixtureConfig { experts, chosen, intermediate_size: inner, .. } = config;
        let hidden = l.spec.config.hidden_size;
        let router = l.tensors.matrix(&format!("{prefix}mlp.gate.weight"), experts, hidden);
        let gate_up = gate_up(l, prefix, [experts, inner, hidden]);
        let down = down(l, prefix, [experts, hidden, inner]);
        let biases = if l.spec.options.expert_bias {
            Biases::load(l, prefix, [experts, inner, hidden]).map(Some)
        } else {
            Some(None)
        };
        let choice_bias = match config.scoring {
            RouterScoring::Softmax | RouterScoring::GroupedSoftmax { .. } => Some(None),
            RouterScoring::Sigmoid { .. } => {
                l.tensors.vector(&format!("{prefix}{CHOICE_BIAS}"), experts, |bias| bias).map(Some)
            }
        };
        let factors = if l.spec.options.expert_factors {
            l.tensors.vector(&format!("{prefix}{FACTORS}"), experts, |factor| factor).map(Some)
        } else {
            Some(None)
        };
        let shared = match config.shared {
            Some(shared) => Shared::load(l, prefix, shared).map(Some),
            None => Some(None),
        };
        let (router, gate_up, down) = (router?, gate_up?, down?);
        let (biases, choice_bias, factors, shared) = (biases?, choice_bias?, factors?, shared?);
        l.quantised |= O::is_quantised(&gate_up) || O::is_quantised(&down);
        let plan = Routes::<O::View<'_>>::plan_len(1, experts, chosen);
        Some(Self {
            router,
            gate_up,
            down,
            biases,
            shared,
            activation: l.spec.options.activation,
            config: config.clone(),
            choice_bias,
            factors,
            scores: l.rows_of(Kind::F32, "router scores", experts)?,
            weights: l.rows_of(Kind::F32, "expert weights", chosen)?,
            plan: l.rows_of(Kind::U32, "expert plan", plan)?,
            projected: l.rows("experts gate and up", chosen * 2 * inner)?,
            activated: l.rows("experts activated", chosen * inner)?,
            results: l.rows("experts results", chosen * hidden)?,
        })
    }

    /// `x.input()` → `x.sublayer_out()`.
    pub fn forward<'a>(&'a self, s: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()> {
        if x.rows() == 0 {
            // This is the last layer of a step without logits.
            return Ok(());
        }
        let out = x.sublayer_out();
        self.compute(s, x, [x.input(); 2], out)
    }

    /// What the router reads and what the experts read → `out`.
    pub fn compute<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        x: &Stream<'a, O>,
        [router_input, input]: [O::View<'a>; 2],
        out: O::View<'a>,
    ) -> Result<()> {
        let rows = x.rows();
        let routes = self.route(s, rows, router_input)?;
        let [gate_up, activated, results] =
            [&self.projected, &self.activated, &self.results].map(|buffer| buffer.first(rows));
        let (w, bias) = (O::matrix(&self.gate_up), self.bias(|biases| &biases.gate_up));
        let args = ExpertLinearArgs { x: input, w, bias, routes, out: gate_up };
        s.ops.expert_linear(&args)?;
        let activation = argument(OpFault::Activation, self.activation, |_| Activation::GeluTanh);
        let width = self.activated.width / self.config.chosen;
        s.ops.gated(&GatedArgs { activation, gate_up, width, out: activated, rounded: false })?;
        let (w, bias) = (O::matrix(&self.down), self.bias(|biases| &biases.down));
        let args = ExpertLinearArgs { x: activated, w, bias, routes, out: results };
        s.ops.expert_linear(&args)?;
        let shared = match &self.shared {
            Some(shared) => Some(shared.forward(s, x)?),
            None => None,
        };
        s.ops.combine(&CombineArgs { x: results, routes, shared, out })?;
        s.add_ranks(out)
    }

    fn bias(&self, of: impl Fn(&Biases<O>) -> &O::Buffer) -> Option<O::View<'_>> {
        self.biases.as_ref().map(|biases| O::view(of(biases)))
    }

    /// Chooses the experts of each of `rows` rows.
    fn route<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        rows: usize,
        input: O::View<'a>,
    ) -> Result<Routes<O::View<'a>>> {
        let &MixtureConfig { experts, chosen, normalise, scale, scoring, .. } = &self.config;
        let len = Routes::<O::View<'_>>::plan_len(rows, experts, chosen);
        let plan = self.plan.first(rows).slice(0..len);
        let routes = Routes { experts, chosen, weights: self.weights.first(rows), plan };
        let scores = self.scores.first(rows);
        let scoring = match (scoring, &self.choice_bias) {
            (RouterScoring::Sigmoid { groups, kept }, Some(bias)) => {
                RouteScoring::Sigmoid { bias: O::view(bias), groups, kept }
            }
            (RouterScoring::GroupedSoftmax { groups, kept }, _) => {
                RouteScoring::GroupedSoftmax { groups, kept }
            }
            _ => RouteScoring::Softmax,
        };
        in_f32(|| {
            let bias = self.biases.as_ref().map(|biases| &biases.router);
            s.whole_linear(&self.router, bias, input, scores)?;
            let args = RouteArgs { scores, scoring, normalise, scale, routes };
            s.ops.route(&args)?;
            let Some(factors) = &self.factors else { return Ok(()) };
            let factors = O::view(factors);
            s.ops.choice_factors(&ChoiceFactorsArgs { routes, factors }).map_err(Error::from)
        })?;
        Ok(routes)
    }
}

impl<O: Ops> Biases<O> {
    fn load(
        l: &mut LayerLoader<O>,
        prefix: &str,
        [experts, inner, hidden]: [usize; 3],
    ) -> Option<Self> {
        let (t, name) = (&mut *l.tensors, |part: &str| format!("{prefix}mlp.{part}.bias"));
        let experts_name = |part: &str| name(&format!("experts.{part}"));
        let [fused, gate, up, down] =
            ["gate_up_proj", "gate_proj", "up_proj", "down_proj"].map(experts_name);
        let router = t.bias_if(Presence::Always, &[(&name("gate"), experts)]);
        let gate_up = if l.spec.options.fused_experts == FusedExperts::InterleavedTransposed {
            t.expert_bias(&[&fused], [experts, 2 * inner], 2)
        } else {
            t.expert_bias(&[&gate, &up], [experts, inner], 1)
        };
        let down = t.expert_bias(&[&down], [experts, hidden], 1);
        Some(Self { router: router??, gate_up: gate_up?, down: down? })
    }
}

impl<O: Ops> Shared<O> {
    fn load(l: &mut LayerLoader<O>, prefix: &str, config: SharedConfig) -> Option<Self> {
        let hidden = l.spec.config.hidden_size;
        let mlp = Mlp::load_as(l, prefix, &SHARED, config.width);
        let gate = if config.gated {
            let name = format!("{prefix}mlp.shared_expert_gate.weight");
            let weight = l.tensors.matrix(&name, 1, hidden);
            let values = l.rows_of(Kind::F32, "shared expert gates", 1);
            Some(SharedGate { weight: weight?, values: values? })
        } else {
            None
        };
        Some(Self { mlp: mlp?, gate, result: l.rows("shared expert result", hidden)? })
    }

    fn forward<'a>(
        &'a self,
        s: &LayerStep<'a, O>,
        x: &Stream<'a, O>,
    ) -> Result<SharedExpert<O::View<'a>>> {
        let result = self.result.first(x.rows());
        self.mlp.compute_part(s, x, result)?;
        let gate = match &self.gate {
            Some(SharedGate { weight, values }) => {
                let gate = values.first(x.rows());
                in_f32(|| s.whole_linear(weight, None, x.input(), gate))?;
                Some(gate)
            }
            None => None,
        };
        Ok(SharedExpert { x: result, gate })
    }
}

/// Whether the matrices of experts are stored transposed. The first ones tell, since the second may
/// be as high as they are wide.
fn are_transposed<O: Ops>(l: &LayerLoader<O>, prefix: &str) -> bool {
    let name = format!("{prefix}mlp.experts.gate_up_proj");
    match l.spec.options.fused_experts {
        FusedExperts::Stacked => false,
        FusedExperts::StackedOrTransposed => {
            l.tensors.has_heights(&name, l.spec.config.hidden_size)
        }
        FusedExperts::InterleavedTransposed => true,
    }
}

/// The matrices of gate and up of all experts: fused in one tensor, or apart.
fn gate_up<O: Ops>(
    l: &mut LayerLoader<O>,
    prefix: &str,
    [experts, inner, hidden]: [usize; 3],
) -> Option<O::Matrix> {
    let fused = ["", ".weight"].map(|end| format!("{prefix}mlp.experts.gate_up_proj{end}"));
    if are_transposed(l, prefix) {
        let in_turn = l.spec.options.fused_experts == FusedExperts::InterleavedTransposed;
        return l.tensors.transposed_experts(&fused[0], [experts, 2 * inner, hidden], 2, in_turn);
    }
    match fused.iter().find(|name| l.tensors.has(name)) {
        Some(name) => l.tensors.experts(&[name], [experts, 2 * inner, hidden], 2 * experts),
        None => expert_matrices(l, prefix, &["gate_proj", "up_proj"], [experts, inner, hidden]),
    }
}

/// The second matrices of all experts, `[hidden, inner]`.
fn down<O: Ops>(l: &mut LayerLoader<O>, prefix: &str, shape: [usize; 3]) -> Option<O::Matrix> {
    if are_transposed(l, prefix) {
        let name = format!("{prefix}mlp.experts.down_proj");
        return l.tensors.transposed_experts(&name, shape, 1, false);
    }
    expert_matrices(l, prefix, &["down_proj"], shape)
}

/// The matrices `[rows, cols]` of some parts of all experts: each part of all experts in one
/// tensor, or each expert's in a tensor of its own.
fn expert_matrices<O: Ops>(
    l: &mut LayerLoader<O>,
    prefix: &str,
    parts: &[&str],
    [experts, rows, cols]: [usize; 3],
) -> Option<O::Matrix> {
    for end in ["", ".weight"] {
        let name = |part: &&str| format!("{prefix}mlp.experts.{part}{end}");
        let stacked: Vec<String> = parts.iter().map(name).collect();
        if stacked.iter().any(|name| l.tensors.has(name)) {
            let names: Vec<&str> = stacked.iter().map(String::as_str).collect();
            return l.tensors.experts(&names, [experts, rows, cols], experts);
        }
    }
    let name = |expert: usize, part: &str| format!("{prefix}mlp.experts.{expert}.{part}.weight");
    let all = (0..experts).flat_map(|expert| parts.iter().map(move |part| name(expert, part)));
    let names: Vec<String> = all.collect();
    let stack: Vec<(&str, usize)> = names.iter().map(|name| (name.as_str(), rows)).collect();
    l.tensors.expert_stack(&stack, cols)
}
