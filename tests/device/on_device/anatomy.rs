//! The parts of a decoding step: how much shorter the recorded step is when the launches of one
//! part are left out. That is the time which the part adds while launches overlap, which a profiler
//! cannot tell because it runs them one after the other.

use crate::Result;
use crate::model::{Source, Wanted};
use crate::sequence::{Decode, decode_seconds};
use crate::targets::{head, predicted_row};
use cresset_kernels::gpu::{
    Arg, Gemm, Gpu, Graph, Kind, Launch, Properties, Rank, Staging, StreamEvent, View,
};
use cresset_models::ModelConfig;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Name, and the beginnings of the names of its kernels.
const SMALL_PARTS: [(&str, &[&str]); 6] = [
    ("attention", &["attention_decode"]),
    ("norms", &["norm"]),
    ("rope and KV write", &["rope"]),
    ("activation", &["silu", "gelu"]),
    ("embedding", &["gather"]),
    ("sampling", &["sampling", "soft_cap"]),
];
/// Products, in the order of a layer; the head comes last.
const PRODUCTS: [&str; 5] = ["qkv", "o", "gate-up", "down", "head"];
/// µs that were predicted for all launches of a part in a step of one row of Llama 3.1 8B after
/// 1000 tokens on one H200, and of 32 rows; NaN where nothing was predicted.
const PREDICTED: [(&str, [f64; 2]); 6] = [
    ("qkv", [416.0, 576.0]),
    ("o", [288.0, 416.0]),
    ("gate-up", [1920.0, 2368.0]),
    ("down", [960.0, 1216.0]),
    ("head", [266.0, 330.0]),
    ("attention", [147.0, 1184.0]),
];
/// Stands for a step of which nothing is left out.
const NOTHING: usize = usize::MAX;

struct Sizes {
    rows: [usize; 2],
    context: usize,
    steps: usize,
}

const DEVICE: Sizes = Sizes { rows: [1, 32], context: 1000, steps: 64 };
const EMULATED: Sizes = Sizes { rows: [1, 3], context: 20, steps: 2 };

pub fn anatomy(source: &Source) -> Result<()> {
    let Sizes { rows, context, steps } = source.sized(DEVICE, EMULATED);
    let config = source.config()?;
    let partial = Arc::new(PartialDevice {
        gpu: source.gpu.clone(),
        products: products(&config),
        left_out: AtomicUsize::new(NOTHING),
        found: Mutex::default(),
    });
    let most = source.sized(2048, 32);
    let loaded = Source { gpu: partial.clone(), ..source.clone() }.load(Wanted {
        kind: Kind::Bf16,
        deterministic: false,
        share: 0.85,
        graphs: true,
        max_batched_tokens: most,
        max_rows: rows[1],
        max_context: context + steps + 8,
    })?;
    partial.check_found()?;
    head();
    for (place, rows) in rows.into_iter().enumerate() {
        let work = Decode { rows, context, steps };
        let timed = |part: usize| -> Result<f64> {
            partial.left_out.store(part, Ordering::Relaxed);
            let found =
                decode_seconds(&mut loaded.runner.clone(), work, config.vocab_size, most)?.0;
            Ok(found * 1e6)
        };
        let whole = timed(NOTHING)?;
        let mut sum = 0.0;
        for (part, name) in part_names().enumerate() {
            let exposed = whole - timed(part)?;
            sum += exposed;
            let prediction = PREDICTED.iter().find(|(known, _)| *known == name);
            predicted_row(
                format!("{name}, batch {rows} after {context} tokens"),
                format!("adds {exposed:.0} µs to a step of {whole:.0}"),
                "",
                &prediction.map_or(String::new(), |(_, us)| format!("{:.0} µs", us[place])),
            );
        }
        predicted_row(
            format!("all parts, batch {rows}"),
            format!("{sum:.0} of {whole:.0} µs"),
            "",
            "",
        );
    }
    Ok(())
}

fn part_names() -> impl Iterator<Item = &'static str> {
    SMALL_PARTS.into_iter().map(|(name, _)| name).chain(PRODUCTS)
}

/// Rows and columns of the matrices.
fn products(m: &ModelConfig) -> [(usize, usize); PRODUCTS.len()] {
    let (heads, hidden, ffn) = (m.heads * m.head_dim, m.hidden_size, m.intermediate_size);
    [
        (heads + 2 * m.kv_heads * m.head_dim, hidden),
        (hidden, heads),
        (2 * ffn, hidden),
        (hidden, ffn),
        (m.vocab_size, hidden),
    ]
}

/// A device that records each graph once whole and once without each part, and replays the one that
/// is asked for. Launches outside of graphs are never left out.
struct PartialDevice {
    gpu: Arc<dyn Gpu>,
    products: [(usize, usize); PRODUCTS.len()],
    left_out: AtomicUsize,
    /// The parts of which a launch was left out of some recording.
    found: Mutex<BTreeSet<usize>>,
}

/// Graphs without each part, and the whole one last.
struct PartialGraphs(Vec<Graph>);

thread_local! {
    /// The part that the recording on this thread leaves out.
    static UNRECORDED: std::cell::Cell<usize> = const { std::cell::Cell::new(NOTHING) };
}

impl PartialDevice {
    fn product(&self, rows: usize, cols: usize) -> usize {
        let place = self.products.iter().position(|product| *product == (rows, cols));
        place.map_or(NOTHING, |place| SMALL_PARTS.len() + place)
    }

    fn part_of(&self, launch: &Launch, args: &[Arg]) -> usize {
        // Behind four operands, whether the output is f32, and the rows of `x`.
        if let Some([Arg::U32(rows), Arg::U32(cols)]) = args.get(6..8)
            && ["gemv", "gemm", "dot"].iter().any(|name| launch.kernel.starts_with(name))
        {
            return self.product(*rows as usize, *cols as usize);
        }
        let named =
            |(_, names): &(&str, &[&str])| names.iter().any(|name| launch.kernel.starts_with(name));
        SMALL_PARTS.iter().position(named).unwrap_or(NOTHING)
    }
}

impl PartialDevice {
    fn is_left_out(&self, part: usize) -> bool {
        let left_out = part != NOTHING && part == UNRECORDED.get();
        if left_out {
            self.found.lock().unwrap_or_else(PoisonError::into_inner).insert(part);
        }
        left_out
    }

    /// Fails when a part has no launches: then its kernels have other names than these.
    fn check_found(&self) -> Result<()> {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        match part_names().enumerate().find(|(part, _)| !found.contains(part)) {
            Some((_, name)) => Err(format!("a step has no launch of {name}").into()),
            None => Ok(()),
        }
    }
}

impl Gpu for PartialDevice {
    fn properties(&self) -> &Properties {
        self.gpu.properties()
    }
    fn overlaps(&self) -> bool {
        self.gpu.overlaps()
    }
    fn memory(&self) -> cresset_kernels::Result<(usize, usize)> {
        self.gpu.memory()
    }
    fn allocate(&self, bytes: usize) -> cresset_kernels::Result<u64> {
        self.gpu.allocate(bytes)
    }
    fn free(&self, address: u64) {
        self.gpu.free(address);
    }
    fn staging(&self, bytes: usize) -> cresset_kernels::Result<Staging> {
        self.gpu.staging(bytes)
    }
    fn upload(&self, from: &Staging, offset: usize, to: View) -> cresset_kernels::Result<()> {
        self.gpu.upload(from, offset, to)
    }
    fn download(&self, from: View, to: &Staging, offset: usize) -> cresset_kernels::Result<()> {
        self.gpu.download(from, to, offset)
    }
    fn copy(&self, from: View, to: View) -> cresset_kernels::Result<()> {
        self.gpu.copy(from, to)
    }
    fn fill(&self, view: View, byte: u8) -> cresset_kernels::Result<()> {
        self.gpu.fill(view, byte)
    }
    fn launch(&self, launch: &Launch, args: &[Arg]) -> cresset_kernels::Result<()> {
        let skipped = self.is_left_out(self.part_of(launch, args));
        if skipped { Ok(()) } else { self.gpu.launch(launch, args) }
    }
    fn gemm(&self, gemm: &Gemm) -> cresset_kernels::Result<()> {
        let skipped = self.is_left_out(self.product(gemm.rows, gemm.cols));
        if skipped { Ok(()) } else { self.gpu.gemm(gemm) }
    }
    fn record(&self) -> cresset_kernels::Result<StreamEvent> {
        self.gpu.record()
    }
    fn wait(&self, event: &StreamEvent) -> cresset_kernels::Result<()> {
        self.gpu.wait(event)
    }
    fn synchronise(&self) -> cresset_kernels::Result<()> {
        self.gpu.synchronise()
    }
    fn capture(
        &self,
        record: &mut dyn FnMut() -> cresset_kernels::Result<()>,
    ) -> cresset_kernels::Result<Graph> {
        let parts = SMALL_PARTS.len() + PRODUCTS.len();
        let mut without = |part: usize| {
            UNRECORDED.set(part);
            let graph = self.gpu.capture(record);
            UNRECORDED.set(NOTHING);
            graph
        };
        let graphs = (0..parts).chain([NOTHING]).map(&mut without).collect::<Result<_, _>>()?;
        Ok(Graph(Box::new(PartialGraphs(graphs))))
    }
    fn replay(&self, graph: &Graph) -> cresset_kernels::Result<()> {
        let PartialGraphs(graphs) = graph.0.downcast_ref().expect("this device recorded it");
        let part = self.left_out.load(Ordering::Relaxed).min(graphs.len() - 1);
        self.gpu.replay(&graphs[part])
    }
    fn rank(&self) -> Rank {
        self.gpu.rank()
    }
    fn all_gather(&self, from: View, to: View) -> cresset_kernels::Result<()> {
        self.gpu.all_gather(from, to)
    }
    fn abandon(&self, why: &str) {
        self.gpu.abandon(why);
    }
}
