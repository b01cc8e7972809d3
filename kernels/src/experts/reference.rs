//! The specification, in plain loops.

/// The choices of rows of scores: their experts, their weights, the begins of the experts and the
/// choices by expert.
pub struct Choices {
    pub experts: Vec<u32>,
    pub weights: Vec<f32>,
    pub begins: Vec<u32>,
    pub order: Vec<u32>,
}

pub fn route(scores: &[f32], experts: usize, chosen: usize, normalise: bool) -> Choices {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for scores in scores.chunks(experts) {
        let row = choose(scores, chosen);
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let part = |id: u32| f64::from(scores[id as usize] - largest).exp();
        let all: f64 = (0..experts as u32).map(part).sum();
        let kept: f64 = row.iter().map(|id| part(*id)).sum();
        let sum = if normalise { kept } else { all };
        let finite = scores.iter().all(|score| score.is_finite());
        weights
            .extend(row.iter().map(|id| if finite { (part(*id) / sum) as f32 } else { f32::NAN }));
        ids.extend(row);
    }
    let of = |expert: usize| {
        let choices = (0..).zip(&ids).filter(move |(_, id)| **id as usize == expert);
        choices.map(|(choice, _)| choice)
    };
    let order: Vec<u32> = (0..experts).flat_map(of).collect();
    let counts = (0..experts).map(|expert| of(expert).count() as u32);
    let begins = std::iter::once(0).chain(counts.scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    }));
    let begins = begins.collect();
    Choices { experts: ids, weights, begins, order }
}

/// The experts of a row, ascending. A row that is not finite has the first ones.
fn choose(scores: &[f32], chosen: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
    if scores.iter().all(|score| score.is_finite()) {
        ids.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b)));
    }
    ids.truncate(chosen);
    ids.sort_unstable();
    ids
}

/// The same for weights that are sigmoids: of the `kept` best of `groups` groups, those experts are
/// chosen whose weight and bias are largest together. The weights are normalised.
pub fn route_by_sigmoid(
    scores: &[f32],
    bias: &[f32],
    chosen: usize,
    [groups, kept]: [usize; 2],
    scale: f32,
) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for scores in scores.chunks(bias.len()) {
        let sigmoids: Vec<f32> = scores.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        let mut ranks: Vec<f32> = sigmoids.iter().zip(bias).map(|(s, bias)| s + bias).collect();
        let size = bias.len() / groups;
        let best: Vec<f32> = ranks
            .chunks(size)
            .map(|ranks| {
                let mut sorted = ranks.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                sorted.iter().take(2).sum()
            })
            .collect();
        let kept = choose(&best, kept);
        for (expert, rank) in ranks.iter_mut().enumerate() {
            if !kept.contains(&((expert / size) as u32)) {
                *rank = f32::MIN;
            }
        }
        let row = choose(&ranks, chosen);
        let sum: f32 = row.iter().map(|id| sigmoids[*id as usize]).sum();
        weights.extend(row.iter().map(|id| sigmoids[*id as usize] / sum * scale));
        ids.extend(row);
    }
    (ids, weights)
}

/// The experts chosen by their scores in the groups whose largest scores are largest.
pub fn choose_in_groups(
    scores: &[f32],
    experts: usize,
    chosen: usize,
    [groups, kept]: [usize; 2],
) -> Vec<u32> {
    let of_row = |scores: &[f32]| {
        let size = experts / groups;
        let best: Vec<f32> = scores
            .chunks(size)
            .map(|group| group.iter().copied().fold(f32::MIN, f32::max))
            .collect();
        let kept = choose(&best, kept);
        let masked = (0..).zip(scores).map(|(expert, score)| {
            if kept.contains(&(expert / size as u32)) { *score } else { f32::MIN }
        });
        choose(&masked.collect::<Vec<f32>>(), chosen)
    };
    scores.chunks(experts).flat_map(of_row).collect()
}

/// The sum of each row's results. `shared`: results of the shared expert and their gates, if it has
/// some.
pub fn combine(
    x: &[f32],
    weights: &[f32],
    chosen: usize,
    width: usize,
    shared: Option<(&[f32], Option<&[f32]>)>,
) -> Vec<f32> {
    let mut out = vec![0.0; weights.len() / chosen * width];
    for (row, out) in out.chunks_mut(width).enumerate() {
        for choice in row * chosen..(row + 1) * chosen {
            for (out, x) in out.iter_mut().zip(&x[choice * width..]) {
                *out += weights[choice] * x;
            }
        }
        if let Some((x, gate)) = shared {
            for (out, x) in out.iter_mut().zip(&x[row * width..]) {
                *out += gate.map_or(*x, |gate| x / (1.0 + (-gate[row]).exp()));
            }
        }
    }
    out
}
