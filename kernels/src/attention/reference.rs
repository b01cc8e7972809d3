//! The specification, in plain loops: one query head over its visible keys.

pub struct Query<'a> {
    pub q: &'a [f32],
    pub scale: f32,
    pub softcap: Option<f32>,
    pub sink: Option<f32>,
}

/// `keys`, `values`: those that the query sees, each a slice of `q.len()`.
pub fn attend(query: &Query, keys: &[&[f32]], values: &[&[f32]]) -> Vec<f32> {
    let scores: Vec<f32> = keys.iter().map(|k| score(query, k)).collect();
    let largest = scores.iter().copied().chain(query.sink).fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = scores.iter().map(|s| (s - largest).exp()).collect();
    let total: f32 = weights.iter().sum::<f32>() + query.sink.map_or(0.0, |s| (s - largest).exp());
    let mut out = vec![0.0; query.q.len()];
    for (weight, value) in weights.iter().zip(values) {
        for (out, v) in out.iter_mut().zip(*value) {
            *out += weight / total * v;
        }
    }
    out
}

fn score(query: &Query, key: &[f32]) -> f32 {
    let dot: f32 = query.q.iter().zip(key).map(|(q, k)| q * k).sum();
    let score = dot * query.scale;
    query.softcap.map_or(score, |cap| cap * (score / cap).tanh())
}
