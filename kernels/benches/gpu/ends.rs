//! The first and the last op of a step.

use crate::case::{Case, f32s};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::embedding::{DeviceTokens, Embedding, GatherArgs};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use cresset_kernels::operand::MatrixView;
use cresset_kernels::sampling::gpu::{
    History, MOST_TOP_LOGPROBS, Sample, encode, encoded_words, sample, workspace,
};
use std::sync::Arc;

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    let ops: [fn(&Arc<dyn Gpu>, &Model, usize) -> Result<Case>; 2] = [embedded, sampled];
    ops.into_iter().flat_map(move |op| model.steps.iter().map(move |n| op(gpu, model, *n)))
}

fn embedded(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let (width, rows) = (m.hidden, m.vocab_size.min(1 << 14));
    let table = bf16s(gpu, 0, rows * width)?;
    let id = move |i: usize| i * 7_919 % rows;
    let ids: Vec<u32> = (0..n).map(|i| id(i) as u32).collect();
    let places = (0..n as u32).collect();
    let arrays =
        [ids, vec![u32::MAX; n], vec![0], places].map(|words| Buffer::from_slice(gpu, &words));
    let [ids, feedback, previous, slots] = arrays;
    let (ids, feedback, previous, slots) = (ids?, feedback?, previous?, slots?);
    let history = output(gpu, Kind::U32, n)?;
    let out = output(gpu, Kind::Bf16, n * width)?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let device = DeviceTokens {
            feedback: feedback.view(),
            previous: previous.view(),
            slots: slots.view(),
            history: history.view(),
        };
        on.gather(&GatherArgs {
            table: MatrixView::dense(table.view(), rows, width),
            ids: ids.view(),
            device: Some(device),
            scale: 1.0,
            out: written.view(),
        })
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

/// Sampling parameters of greedy rows.
fn sampled(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let vocab_size = m.vocab_size;
    let logits = f32s(gpu, 0, n * vocab_size)?;
    let mut words = vec![0; encoded_words(n, 0)];
    encode(&[], |_| 0, n, 0, &mut words);
    let [params, empty] = [words, vec![0; 2]].map(|words| Buffer::from_slice(gpu, &words));
    let (params, empty) = (params?, empty?);
    let out = output(gpu, Kind::U32, n)?;
    let results = output(gpu, Kind::U32, n * (2 + 2 * MOST_TOP_LOGPROBS))?;
    let workspace = output(gpu, Kind::U8, workspace(n, vocab_size))?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let none = empty.view();
        let args = Sample {
            logits: logits.view(),
            vocab_size,
            params: params.view(),
            masks: none,
            history: History {
                tokens: none,
                seq_lens: none.slice(0..1),
                tables: none,
                table_starts: none,
                block_size: 16,
            },
            tokens: written.view(),
            results: results.view(),
            workspace: workspace.view(),
        };
        sample(&*on, &args)
    };
    let want = move |row: usize| {
        let logit = |token: usize| value(0, row * vocab_size + token);
        let best = (1..vocab_size)
            .fold(0, |best, token| if logit(token) > logit(best) { token } else { best });
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
