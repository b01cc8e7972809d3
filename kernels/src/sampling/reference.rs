//! The specification, in plain loops.

use super::{
    DeviceRow, SampleError, SampleResult, Sampled, SamplingParams, TokenLogprobs, gumbel_noise,
};

pub fn mass(row: &[f32]) -> f64 {
    row.iter().map(|x| f64::from(*x).exp()).sum()
}

pub fn gumbel_argmax(scaled: &[f32], seed: u64, position: u32) -> Option<u32> {
    let mut best: Option<(u32, f64)> = None;
    for (id, &x) in (0..).zip(scaled).filter(|(_, x)| **x > f32::NEG_INFINITY) {
        let value = f64::from(x) + gumbel_noise(seed, position, id);
        if best.is_none_or(|(_, most)| value > most) {
            best = Some((id, value));
        }
    }
    best.map(|(id, _)| id)
}

/// A row's result by sorting everything; `history` holds its sequence's tokens.
pub fn sample(logits: &[f32], row: &DeviceRow, history: &[u32]) -> SampleResult {
    let params = &row.params;
    if logits.iter().any(|x| !x.is_finite()) {
        return Err(SampleError::SomeNotFinite);
    }
    let adjusted = adjusted(logits, row, history);
    let max = adjusted.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NothingLeft);
    }
    let token = if params.temperature > 0.0 {
        let scaled: Vec<f32> = adjusted.iter().map(|x| (x - max) / params.temperature).collect();
        gumbel_argmax(&truncated(&scaled, params), params.seed, row.position).unwrap()
    } else {
        adjusted.iter().position(|x| *x == max).unwrap() as u32
    };
    let logprobs = params.logprobs.map(|top| {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let relative: Vec<f32> = logits.iter().map(|x| x - max).collect();
        let total = f64::from(max) + mass(&relative).ln();
        let logprob = |id: u32| (f64::from(logits[id as usize]) - total) as f32;
        let most_likely = ranked(logits).into_iter().take(top.into());
        let top = most_likely.map(|id| (id, logprob(id))).collect();
        TokenLogprobs { chosen: logprob(token), top }
    });
    Ok(Sampled { token, logprobs })
}

fn adjusted(logits: &[f32], row: &DeviceRow, history: &[u32]) -> Vec<f32> {
    let params = &row.params;
    let mut logits = logits.to_vec();
    for (id, x) in (0..).zip(&mut logits).filter(|(id, _)| history.contains(id)) {
        let output = history.iter().skip(row.prompt_len as usize);
        let count = output.filter(|token| **token == id).count();
        *x = if *x > 0.0 { *x / params.repetition_penalty } else { *x * params.repetition_penalty };
        *x -= params.frequency_penalty * count as f32;
        *x -= if count > 0 { params.presence_penalty } else { 0.0 };
    }
    for special in &row.specials {
        if let Some(x) = logits.get_mut(special.token as usize) {
            *x += special.bias;
        }
    }
    logits
}

/// Ids, the largest first, the lower id among equals.
fn ranked(values: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..values.len() as u32).collect();
    ids.sort_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]));
    ids
}

/// Replaces logits that top-k, top-p and min-p leave out by minus infinity.
fn truncated(scaled: &[f32], params: &SamplingParams) -> Vec<f32> {
    let mut ids = ranked(scaled);
    if params.top_k > 0 {
        ids.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let weight = |id: &u32| f64::from(scaled[*id as usize]).exp();
        let wanted = f64::from(params.top_p) * ids.iter().map(weight).sum::<f64>();
        let mut sum = 0.0;
        let reached = ids.iter().position(|id| {
            sum += weight(id);
            sum >= wanted
        });
        ids.truncate(reached.map_or(ids.len(), |at| at + 1));
    }
    let mut left = vec![f32::NEG_INFINITY; scaled.len()];
    for id in ids.into_iter().map(|id| id as usize).filter(|id| scaled[*id] >= params.min_p.ln()) {
        left[id] = scaled[id];
    }
    left
}
