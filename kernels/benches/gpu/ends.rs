//! The first and the last op of a step.

use crate::case::{Case, f32s};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::embedding::gpu::{Gather, gather};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use cresset_kernels::sampling::gpu::{MOST_TOP_LOGPROBS, Sample, encode, encoded_words, sample, workspace};
use std::sync::Arc;

pub fn cases<'a>(gpu: &'a Arc<dyn Gpu>, model: &'a Model) -> impl Iterator<Item = Result<Case>> + 'a {
    let ops: [fn(&Arc<dyn Gpu>, &Model, usize) -> Result<Case>; 2] = [embedded, sampled];
    ops.into_iter().flat_map(move |op| model.steps.iter().map(move |n| op(gpu, model, *n)))
}

fn embedded(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let (width, rows) = (m.hidden, m.vocab_size.min(1 << 14));
    let table = bf16s(gpu, 0, rows * width)?;
    let id = move |i: usize| i * 7_919 % rows;
    let ids: Vec<u32> = (0..n).map(|i| id(i) as u32).collect();
    let [ids, feedback, previous] = [ids, vec![u32::MAX; n], vec![0]].map(|words| Buffer::from_slice(gpu, &words));
    let (ids, feedback, previous) = (ids?, feedback?, previous?);
    let out = output(gpu, Kind::Bf16, n * width)?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let [table, ids, feedback, previous] = [table.view(), ids.view(), feedback.view(), previous.view()];
        gather(&*on, &Gather { table, width, ids, feedback, previous, scale: 1.0, out: written.view() })
    };
    Ok(Case {
        op: "embedding",
        shape: width.to_string(),
        n,
        bytes: 2 * n * width * 2,
        flops: 0,
        tolerance: 0.0,
        out,
        want: Box::new(move |i| value(0, id(i / width) * width + i % width)),
        launch: Box::new(launch),
    })
}

/// Greedy rows.
fn sampled(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let vocab_size = m.vocab_size;
    let logits = f32s(gpu, 0, n * vocab_size)?;
    let mut words = vec![0; encoded_words(n, 0)];
    encode(&[], n, &mut words);
    let [params, previous] = [words, vec![0]].map(|words| Buffer::from_slice(gpu, &words));
    let (params, previous) = (params?, previous?);
    let out = output(gpu, Kind::U32, n)?;
    let results = output(gpu, Kind::U32, n * (2 + 2 * MOST_TOP_LOGPROBS))?;
    let workspace = output(gpu, Kind::U8, workspace(n, vocab_size))?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let args = Sample {
            logits: logits.view(),
            vocab_size,
            params: params.view(),
            previous: previous.view(),
            tokens: written.view(),
            results: results.view(),
            workspace: workspace.view(),
        };
        sample(&*on, &args)
    };
    let want = move |row: usize| {
        let logit = |token: usize| value(0, row * vocab_size + token);
        let best = (1..vocab_size).fold(0, |best, token| if logit(token) > logit(best) { token } else { best });
        best as f64
    };
    Ok(Case {
        op: "greedy sampling",
        shape: vocab_size.to_string(),
        n,
        bytes: n * vocab_size * 4,
        flops: n * vocab_size,
        tolerance: 0.0,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}
