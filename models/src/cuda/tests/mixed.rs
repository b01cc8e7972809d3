//! Steps with prompts beside sequences that decode: which calls they make of a device, and that the
//! other sequences of a step change no logits.

use super::*;
use cresset_kernels::Result;
use cresset_kernels::gpu::{Arg, Gemm, Gpu, Graph, Launch, Properties, Rank, View};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

/// A device that records which calls are made of it.
pub(super) struct Spy {
    gpu: Arc<dyn Gpu>,
    noted: Mutex<Noted>,
}

#[derive(Default)]
pub(super) struct Noted {
    /// Words of each.
    pub uploads: Vec<usize>,
    pub kernels: Vec<&'static str>,
    /// The kind of memory of which there is no more.
    full: Option<&'static str>,
    /// Rows of x rounded up to a power of two, rows and columns of w, and whether there is a bias:
    /// algorithms are chosen by these.
    products: HashSet<(usize, usize, usize, bool)>,
}

impl Noted {
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Spy {
    pub(super) fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap()
    }

    fn has_room(&self, op: &'static str) -> Result<()> {
        let full = self.noted().full == Some(op);
        let error = || Err(cresset_kernels::Error::OutOfMemory { op, detail: "full".into() });
        if full { error() } else { Ok(()) }
    }
}

impl Gpu for Spy {
    fn properties(&self) -> &Properties {
        self.gpu.properties()
    }
    fn overlaps(&self) -> bool {
        self.gpu.overlaps()
    }
    fn memory(&self) -> Result<(usize, usize)> {
        self.gpu.memory()
    }
    fn allocate(&self, bytes: usize) -> Result<u64> {
        self.has_room("allocate")?;
        self.gpu.allocate(bytes)
    }
    fn free(&self, address: u64) {
        self.gpu.free(address);
    }
    fn staging(&self, bytes: usize) -> Result<Staging> {
        self.has_room("staging")?;
        self.gpu.staging(bytes)
    }
    fn upload(&self, from: &Staging, offset: usize, to: View) -> Result<()> {
        self.noted().uploads.push(to.len());
        self.gpu.upload(from, offset, to)
    }
    fn download(&self, from: View, to: &Staging, offset: usize) -> Result<()> {
        self.gpu.download(from, to, offset)
    }
    fn copy(&self, from: View, to: View) -> Result<()> {
        self.gpu.copy(from, to)
    }
    fn fill(&self, view: View, byte: u8) -> Result<()> {
        self.gpu.fill(view, byte)
    }
    fn launch(&self, launch: &Launch, args: &[Arg]) -> Result<()> {
        self.noted().kernels.push(launch.kernel);
        self.gpu.launch(launch, args)
    }
    fn gemm(&self, gemm: &Gemm) -> Result<()> {
        let Gemm { n, rows, cols, bias, .. } = *gemm;
        self.noted().products.insert((n.next_power_of_two(), rows, cols, bias.is_some()));
        self.gpu.gemm(gemm)
    }
    fn record(&self) -> Result<StreamEvent> {
        self.gpu.record()
    }
    fn wait(&self, event: &StreamEvent) -> Result<()> {
        self.gpu.wait(event)
    }
    fn synchronise(&self) -> Result<()> {
        self.gpu.synchronise()
    }
    fn capture(&self, record: &mut dyn FnMut() -> Result<()>) -> Result<Graph> {
        self.gpu.capture(record)
    }
    fn replay(&self, graph: &Graph) -> Result<()> {
        self.gpu.replay(graph)
    }
    fn rank(&self) -> Rank {
        self.gpu.rank()
    }
    fn all_gather(&self, from: View, to: View) -> Result<()> {
        self.gpu.all_gather(from, to)
    }
    fn abandon(&self, why: &str) {
        self.gpu.abandon(why);
    }
}

pub(super) fn spied(tiny: &TinyLlama, options: &ModelOptions) -> (CudaModel, Arc<Spy>) {
    let spy = Arc::new(Spy { gpu: options.gpu.clone().unwrap(), noted: Mutex::default() });
    let gpu: Arc<dyn Gpu> = spy.clone();
    (load(tiny, &ModelOptions { gpu: Some(gpu), ..options.clone() }).unwrap(), spy)
}

/// One step with the first `lens[i]` tokens of sequence i.
fn prompts(lens: &[usize]) -> ForwardBatch {
    let tokens: Vec<_> = lens.iter().enumerate().map(|(i, len)| tokens(*len, i)).collect();
    let blocks: Vec<Vec<u32>> =
        (0..lens.len() as u32).map(|i| (i * 4..i * 4 + 4).collect()).collect();
    let span = |(tokens, blocks)| Span { tokens, cached: 0, blocks };
    let spans: Vec<_> = tokens
        .iter()
        .zip(&blocks)
        .map(|(tokens, blocks)| span((tokens.as_slice(), blocks)))
        .collect();
    batch(&spans, BLOCK, true)
}

#[test]
fn each_sequence_goes_through_the_attention_that_suits_it_after_one_upload() {
    let (mut model, spy) = spied(
        &TinyLlama::default(),
        &ModelOptions { max_rows: 4, gpu_graph_rows: 0, ..options(Kind::Bf16) },
    );
    for (lens, decodes, prefills) in [
        (&[1, 1, 1][..], true, false),
        (&[20], false, true),
        (&[1, 1, 20], true, true),
        (&[20, 1, 1], false, true),
        (&[1, 20, 1], true, true),
        // More sequences than decode's workspace has rows.
        (&[1, 1, 1, 1, 1], true, true),
    ] {
        let mut step = prompts(lens);
        step.logits_indices.truncate(4);
        spy.noted().clear();
        let rows = vec![DeviceRow::greedy(); step.logits_indices.len()];
        model.start(&step, &rows).unwrap();
        model.collect().unwrap();
        let noted = spy.noted();
        let launched = |part| noted.kernels.iter().any(|kernel| kernel.starts_with(part));
        let found =
            (launched("attention_decode"), launched("attention_prefill"), noted.uploads.len());
        assert_eq!(found, (decodes, prefills, 1), "{lens:?}");
    }
}

/// The steps after it compute and are replayed as before.
#[test]
fn inputs_that_find_no_room_fail_their_step_alone() {
    let (mut model, spy) = spied(&TinyLlama::default(), &options(Kind::F32));
    let mut token = |biased: u32| {
        let specials = (0..biased).map(|i| Special { token: i % 64, bias: 0.0 }).collect();
        let row = DeviceRow { specials, ..DeviceRow::greedy() };
        model.start(&prompts(&[1]), &[row])?;
        Ok(model.collect()?.remove(0).unwrap().token)
    };
    let first = token(0).unwrap();
    for full in ["allocate", "staging"] {
        *spy.noted() = Noted { full: Some(full), ..Noted::default() };
        let error: Error = token(9000).unwrap_err();
        let expected = matches!(
            error,
            Error::Kernel(cresset_kernels::Error::OutOfMemory { op, .. }) if op == full
        );
        assert!(expected, "{full}: {error}");
        assert_eq!(token(0).unwrap(), first);
        assert_eq!(spy.noted().kernels, [""; 0], "{full}: the recorded step is replayed");
    }
    *spy.noted() = Noted::default();
    assert_eq!(token(9000).unwrap(), first);
}

/// Choosing an algorithm takes longer than a step, so no step of serving may be the first with its
/// products.
#[test]
fn serving_runs_no_product_that_loading_did_not() {
    let sizes = ModelOptions {
        max_batched_tokens: 40,
        max_rows: 20,
        gpu_graph_rows: 0,
        ..options(Kind::Bf16)
    };
    let (mut model, spy) = spied(&TinyLlama { layers: 2, ..TinyLlama::default() }, &sizes);
    let known = spy.noted().products.clone();
    assert!(known.len() > 4);
    let steps = (1..=40)
        .map(|len| vec![len])
        .chain((1..=20).map(|rows| vec![1; rows]))
        .chain((1..=20).map(|rows| vec![2; rows]));
    for lens in steps {
        let step = prompts(&lens);
        model.start(&step, &vec![DeviceRow::greedy(); lens.len()]).unwrap();
        model.collect().unwrap();
        assert_eq!(spy.noted().products, known, "{lens:?}");
    }
}

/// With `deterministic` the logits are the same bit for bit, in whatever order the sequences stand
/// and whichever attention that order leads to.
#[test]
fn other_sequences_change_no_logit() {
    const SEQUENCES: [(usize, usize); 6] = [(300, 1), (5, 1), (0, 20), (290, 9), (0, 1), (63, 2)];
    for (kind, deterministic) in [(Kind::Bf16, true), (Kind::F32, false)] {
        let sizes = ModelOptions {
            deterministic,
            max_context: Some(640),
            gpu_graph_rows: 0,
            ..options(kind)
        };
        let mut model = load(&TinyLlama { seed: 15, ..TinyLlama::default() }, &sizes).unwrap();
        let known: Vec<_> =
            SEQUENCES.iter().enumerate().map(|(i, (from, new))| tokens(from + new, i)).collect();
        let blocks: Vec<Vec<u32>> = (0..6).map(|i| (0..20).map(|j| j * 6 + i).collect()).collect();
        let span = |i: usize, from: usize, to: usize| Span {
            tokens: &known[i][from..to],
            cached: from,
            blocks: &blocks[i],
        };
        let new = |i: usize| span(i, SEQUENCES[i].0, known[i].len());
        let mut want = Vec::new();
        for (i, (cached, _)) in SEQUENCES.into_iter().enumerate() {
            for from in (0..cached).step_by(64) {
                model.logits(&batch(&[span(i, from, cached.min(from + 64))], BLOCK, true));
            }
            want.extend(model.logits(&batch(&[new(i)], BLOCK, true)));
        }
        for order in
            [[0, 1, 4, 2, 3, 5], [2, 0, 3, 1, 4, 5], [1, 3, 0, 5, 4, 2], [4, 5, 3, 2, 1, 0]]
        {
            let together = model.logits(&batch(&order.map(new), BLOCK, true));
            let want = order.map(|i| want[i].clone());
            if deterministic {
                assert!(together == want, "{order:?}");
            } else {
                assert_close(&together, &want, &format!("{order:?}"));
            }
        }
    }
}

/// Blocks share the keys of a few queries behind a long prefix. With `deterministic` they do not,
/// because the parts of the keys depend on the whole step.
#[test]
fn a_short_tail_behind_a_long_prefix_is_computed_in_parts() {
    let all = tokens(600, 3);
    let prefix = all.len() - 5;
    let blocks: Vec<u32> = (0..38).collect();
    let run = |deterministic| {
        let sizes = ModelOptions {
            deterministic,
            max_context: Some(640),
            gpu_graph_rows: 0,
            ..options(Kind::Bf16)
        };
        let (mut model, spy) = spied(&TinyLlama { seed: 16, ..TinyLlama::default() }, &sizes);
        let span = |from, to| Span { tokens: &all[from..to], cached: from, blocks: &blocks };
        for from in (0..prefix).step_by(64) {
            model.logits(&batch(&[span(from, prefix.min(from + 64))], BLOCK, true));
        }
        spy.noted().kernels.clear();
        let tail = model.logits(&batch(&[span(prefix, all.len())], BLOCK, true));
        let noted = spy.noted();
        let launched = |part| noted.kernels.iter().any(|kernel| kernel.starts_with(part));
        let parts = ["attention_prefill_part", "attention_combine_parts"].map(launched);
        assert_eq!(parts, [!deterministic; 2]);
        tail
    };
    let error = error(&run(false), &run(true));
    assert!(error < 0.02, "{error}");
}
