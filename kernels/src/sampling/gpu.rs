//! Sampling on a device. Parameters are applied in the same order, and random numbers are the same,
//! as on the CPU. `sampling.cuh` describes the kernels.

use super::{DeviceRow, SampleError, SampleResult, Sampled, TokenLogprobs};
use crate::activation::SoftCap;
use crate::error::ensure;
use crate::gpu::{Arg, Gpu, Kind, Launch, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

/// The most log-probabilities that a row reports in addition to that of the chosen token.
pub const MOST_TOP_LOGPROBS: usize = 20;

/// The tokens that penalties count. Each is in the slot in which the cache keeps its K and V.
#[derive(Clone, Copy)]
pub struct History {
    /// `[blocks * block_size]` u32.
    pub tokens: View,
    /// `[sequences]` u32: the number of tokens of each.
    pub seq_lens: View,
    /// u32: the blocks of each sequence, one sequence after the other.
    pub tables: View,
    /// `[sequences + 1]` u32: the place in `tables` of each sequence's first block, and of the end.
    pub table_starts: View,
    /// A multiple of four.
    pub block_size: usize,
}

pub struct Sample {
    /// `[rows, vocab_size]` f32; overwritten.
    pub logits: View,
    pub vocab_size: usize,
    /// The words that `encode` wrote for as many padded rows, uploaded: u32.
    pub params: View,
    /// `[masked rows, mask_words]` u32: the tokens that may be drawn in each row which is masked,
    /// in the order of the rows, as `write_mask` writes them. Others are not read.
    pub masks: View,
    pub history: History,
    /// `[rows]` u32.
    pub tokens: View,
    /// `[rows, 2 + 2 * MOST_TOP_LOGPROBS]` u32: see `decode`.
    pub results: View,
    /// `workspace` bytes, u8.
    pub workspace: View,
}

/// Words of a row's parameters and of a special token, as `sampling.cuh` declares them.
const ROW_WORDS: usize = 16;
const SPECIAL_WORDS: usize = 2;
/// Words of a row's result.
pub const RESULT_WORDS: usize = 2 + 2 * MOST_TOP_LOGPROBS;
/// Fills a result that has no further id.
const NONE: u32 = u32::MAX;
/// Replace the token in a result.
const NOT_FINITE: u32 = u32::MAX;
const NOTHING_LEFT: u32 = u32::MAX - 1;

/// Ids of a chunk of the vocabulary, as in `sampling.cuh`.
const CHUNK: usize = 4096;
/// The largest vocabulary: sums of masses, of 40 bits each, must fit 64 bits.
const MOST_IDS: usize = 1 << 23;
/// Bytes of a row in the workspace, and for each chunk of its vocabulary, as `sampling.cuh`
/// declares them.
const ROW_BYTES: usize = (512 + 2048 + 2) * 8;
const CHUNK_BYTES: usize = (4 + MOST_TOP_LOGPROBS) * 8;

/// The most words that `encode` writes for `rows` rows, including padding, with `specials` special
/// tokens in all.
pub fn encoded_words(rows: usize, specials: usize) -> usize {
    rows * ROW_WORDS + specials * SPECIAL_WORDS
}

/// Words of a row's mask: a bit for each id.
pub fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// Writes a row's mask: ids beyond `allowed` may not be drawn.
pub fn write_mask(allowed: &[u32], to: &mut [u32]) {
    let known = allowed.len().min(to.len());
    to[..known].copy_from_slice(&allowed[..known]);
    to[known..].fill(0);
}

/// Writes the parameters of each row, of which the i-th belongs to sequence `sequence_of(i)`. Then
/// it skips `between` words (an even number), and writes the rows' special tokens. Rows beyond
/// those given are a graph's padding, and are greedy.
///
/// # Panics When `words` are fewer than `encoded_words` and those between, or the rows more than
/// `padded_rows`.
pub fn encode(
    rows: &[DeviceRow],
    sequence_of: impl Fn(usize) -> u32,
    padded_rows: usize,
    between: usize,
    words: &mut [u32],
) {
    assert!(rows.len() <= padded_rows, "{} rows padded to {padded_rows}", rows.len());
    assert!(between.is_multiple_of(SPECIAL_WORDS), "{between} words");
    let (heads, specials) = words.split_at_mut(padded_rows * ROW_WORDS);
    let (heads, _) = heads.as_chunks_mut::<ROW_WORDS>();
    let (entries, _) = specials.as_chunks_mut::<SPECIAL_WORDS>();
    let (mut first, mut masks) = (between / SPECIAL_WORDS, 0);
    for (i, (head, row)) in heads.iter_mut().zip(rows).enumerate() {
        masks += u32::from(row.masked);
        let mask = if row.masked { masks } else { 0 };
        *head = encode_row(row, sequence_of(i), first, mask);
        for (entry, special) in entries[first..].iter_mut().zip(&row.specials) {
            *entry = [special.token, special.bias.to_bits()];
        }
        first += row.specials.len();
    }
    heads[rows.len()..].fill(encode_row(&DeviceRow::greedy(), 0, 0, 0));
}

/// `mask` is the number of the row's mask, counted from 1, or 0.
fn encode_row(row: &DeviceRow, sequence: u32, first_special: usize, mask: u32) -> [u32; ROW_WORDS] {
    let DeviceRow { params, position, prompt_len, specials, masked: _ } = row;
    let most = |n: u8| 1 + u32::from(n).min(MOST_TOP_LOGPROBS as u32);
    [
        params.temperature.to_bits(),
        params.top_p.to_bits(),
        params.top_k,
        // The host takes the logarithm, so that the threshold has the same bits as on the CPU.
        params.min_p.ln().max(f32::MIN).to_bits(),
        params.frequency_penalty.to_bits(),
        params.presence_penalty.to_bits(),
        params.repetition_penalty.to_bits(),
        *position,
        params.seed as u32,
        (params.seed >> 32) as u32,
        params.logprobs.map_or(0, most),
        sequence,
        *prompt_len,
        first_special as u32,
        specials.len() as u32,
        mask,
    ]
}

/// Bytes of workspace for `rows` rows.
pub fn workspace(rows: usize, vocab_size: usize) -> usize {
    rows * row_bytes(vocab_size)
}

fn row_bytes(vocab_size: usize) -> usize {
    ROW_BYTES
        + vocab_size.div_ceil(CHUNK) * CHUNK_BYTES
        + vocab_size.next_multiple_of(4) * Kind::F32.bytes()
}

/// Reads one row of `results`. `logprobs` is the number that its parameters asked for.
pub fn decode(result: &[u32], logprobs: Option<u8>) -> SampleResult {
    let read = |top: u8| {
        let (pairs, _) = result[2..].as_chunks::<2>();
        let known = pairs.iter().take(top.into()).take_while(|[id, _]| *id != NONE);
        TokenLogprobs {
            chosen: f32::from_bits(result[1]),
            top: known.map(|&[id, logprob]| (id, f32::from_bits(logprob))).collect(),
        }
    };
    match result[0] {
        NOT_FINITE => Err(SampleError::SomeNotFinite),
        NOTHING_LEFT => Err(SampleError::NothingLeft),
        token => Ok(Sampled { token, logprobs: logprobs.map(read) }),
    }
}

/// Samples as many rows as there are `tokens`. Everything else is read on the device, so a recorded
/// launch stays right. A row for which no token can be chosen gets 0 in `tokens`.
pub fn sample(gpu: &dyn Gpu, args: &Sample) -> Result<()> {
    let &Sample { logits, vocab_size, params, masks, history, tokens, results, workspace: work } =
        args;
    let rows = tokens.len();
    let words = [params, masks, tokens, results].iter().all(|view| view.kind() == Kind::U32);
    let kinds = words
        && logits.kind() == Kind::F32
        && work.kind() == Kind::U8
        && work.address().is_multiple_of(8);
    let sizes = (1..=MOST_IDS).contains(&vocab_size)
        && logits.len() == rows * vocab_size
        && params.len() >= encoded_words(rows, 0)
        && results.len() == rows * RESULT_WORDS
        && work.len() >= workspace(rows, vocab_size);
    ensure("sampling", kinds && sizes, || {
        format!("{logits:?}, {params:?}, {results:?} and {work:?} for {rows} rows of {vocab_size}")
    })?;
    history.check()?;
    if rows == 0 {
        return Ok(());
    }
    let chunks = [vocab_size.div_ceil(CHUNK) as u32, rows as u32, 1];
    let launch = |kernel, blocks, own: &[Arg]| {
        let common =
            args![logits, vocab_size, params, params.len(), rows, work, row_bytes(vocab_size)];
        gpu.launch(
            &Launch { kernel, blocks, threads: 256, shared_bytes: 0 },
            &[&common, own].concat(),
        )
    };
    let own = [&args![masks, masks.len()][..], &history.args()].concat();
    launch("sampling_scan_f32", chunks, &own)?;
    launch("sampling_histogram_f32", chunks, &[])?;
    launch("sampling_gumbel_max_f32", chunks, &[])?;
    launch("sampling_choose_f32", [rows as u32, 1, 1], &args![tokens, results])
}

impl History {
    fn check(&self) -> Result<()> {
        let &Self { tokens, seq_lens, tables, table_starts, block_size } = self;
        let views = [tokens, seq_lens, tables, table_starts];
        let fits = views.iter().all(|view| view.kind() == Kind::U32)
            && table_starts.len() == seq_lens.len() + 1
            && tokens.address().is_multiple_of(16)
            && block_size.is_multiple_of(4);
        ensure("sampling", fits, || {
            format!(
                "{tokens:?}, {seq_lens:?}, {tables:?}, {table_starts:?}, blocks of {block_size}"
            )
        })
    }

    fn args(&self) -> [Arg; 8] {
        let &Self { tokens, seq_lens, tables, table_starts, block_size } = self;
        let lens = [tokens, tables, seq_lens].map(View::len);
        args![tokens, tables, table_starts, seq_lens, lens[0], lens[1], lens[2], block_size]
    }
}

/// `soft_cap.cu` has the kernel.
impl SoftCap for DeviceOps {
    fn soft_cap(&self, values: View, cap: f32) -> Result<()> {
        ensure("soft cap", values.kind() == Kind::F32, || format!("{values:?}"))?;
        if values.is_empty() {
            return Ok(());
        }
        let blocks = [values.len().div_ceil(1024) as u32, 1, 1];
        let launch = Launch { kernel: "soft_cap_f32", blocks, threads: 256, shared_bytes: 0 };
        self.launch(&launch, &args![values, values.len() as u64, cap])
    }
}

#[cfg(test)]
mod tests;
