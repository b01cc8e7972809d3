//! The words of a step, which the host writes and uploads each time.

use super::*;
use cresset_kernels::attention::plan::{DecodeGrid, KeyCuts};

const BLOCK_SIZE: usize = 16;
const DUMMIES: [u32; 2] = [9_999_999, 9_999_998];
const DUMMY_STATE: u32 = 9_999_997;
/// The blocks of a group of layers.
const GROUP: u32 = 1_000_000;

/// A step in which sequences of these lengths decode. Block b of sequence i in group g of the
/// layers is `GROUP` g + 10000 i + b, and tables have entries beyond the tokens.
fn decoding(lens: &[u32], groups: u32) -> ForwardBatch {
    let rows = lens.len() as u32;
    let table = |(group, i, len): (u32, usize, &u32)| {
        let blocks = len.div_ceil(BLOCK_SIZE as u32) + 3;
        (0..blocks).map(|block| GROUP * group + 10_000 * i as u32 + block).collect()
    };
    let of_group = |group| lens.iter().enumerate().map(move |(i, len)| (group, i, len));
    ForwardBatch {
        input_ids: vec![0; lens.len()],
        positions: lens.iter().map(|len| len - 1).collect(),
        slot_mapping: (0..groups * rows).collect(),
        cu_seqlens_q: (0..=rows).collect(),
        seq_lens: lens.to_vec(),
        block_tables: (0..groups).flat_map(of_group).map(table).collect(),
        logits_indices: (0..rows).collect(),
        ..ForwardBatch::default()
    }
}

/// Writes the step, with padding up to `rows` rows, and hands its words to `check`.
fn written(lens: &[u32], rows: usize, check: impl FnOnce(&[u32], &Layout, &[DecodePlan])) {
    written_batch(&decoding(lens, 1), rows, check);
}

fn written_batch(
    batch: &ForwardBatch,
    rows: usize,
    check: impl FnOnce(&[u32], &Layout, &[DecodePlan]),
) {
    let grid = DecodeGrid { multiprocessors: 132, resident: 4, enough: 2, head_tiles: 8 };
    let padded: Vec<u32> = batch.seq_lens.iter().copied().chain(repeat(1)).take(rows).collect();
    let plans =
        [None, Some(4096)].map(|window| DecodePlan::new(&padded, window, KeyCuts::Anywhere, &grid));
    let model = ModelShape {
        shares: [grid.most_shares(); KINDS],
        groups: batch.block_tables.len() / batch.seq_lens.len(),
        has_states: !batch.state_writes.is_empty(),
    };
    let shape = StepShape::decode(rows, model);
    let staged = Staged {
        batch,
        rows: &[],
        shape,
        plans: &plans,
        prefill_split: 64,
        dummy_blocks: &DUMMIES,
        dummy_state: DUMMY_STATE,
        block_size: BLOCK_SIZE,
    };
    let mut words = vec![u32::MAX; staged.words()];
    staged.write(&mut words);
    check(&words, &Layout::new(&shape), &plans);
}

/// A long sequence in a crowd costs as many words as it has blocks, and the others no more than
/// without it.
#[test]
fn a_step_has_a_word_for_each_block_that_holds_tokens() {
    let crowd = [&[500; 255][..], &[100_000]].concat();
    let mut counts = Vec::new();
    for lens in [&[500; 256][..], &crowd] {
        let blocks: usize = lens.iter().map(|len| (*len as usize).div_ceil(BLOCK_SIZE)).sum();
        written(lens, lens.len(), |words, at, plans| {
            let pieces: usize = plans.iter().map(|plan| plan.pieces.len()).sum();
            let list = blocks.next_multiple_of(4) + pieces * KeyPiece::WORDS;
            assert_eq!(words.len() - at.list, list);
            counts.push(words.len());
        });
    }
    // A table has 32 blocks, the long one 6250; the long one is cut into some 30 pieces.
    assert!(counts[1] - counts[0] < 6250 - 32 + 2 * 66 * KeyPiece::WORDS, "{counts:?}");
    assert!(counts[1] < 26_000, "{counts:?}, where rows times the longest are 1600000");
}

#[test]
fn tables_and_pieces_are_found_where_the_step_says() {
    let lens = [20, 1, 5000, 16];
    written_batch(&decoding(&lens, 2), 6, |words, at, plans| {
        let list = &words[at.list..];
        for (group, dummy) in (0..).zip(DUMMIES) {
            let starts = &words[at.table_starts.clone()][group * 7..][..7];
            let table = |row: usize| &list[starts[row] as usize..starts[row + 1] as usize];
            for (row, len) in lens.iter().enumerate() {
                let first = GROUP * group as u32 + 10_000 * row as u32;
                let want: Vec<u32> = (first..first + len.div_ceil(BLOCK_SIZE as u32)).collect();
                assert_eq!(table(row), want, "row {row} of group {group}");
            }
            assert_eq!([table(4), table(5)], [[dummy]; 2]);
            let slots = &words[at.slots.clone()][group * 6..][..6];
            let own: Vec<u32> = (group as u32 * 4..).take(4).collect();
            assert_eq!((&slots[..4], &slots[4..]), (&own[..], &[dummy * BLOCK_SIZE as u32; 2][..]));
        }
        for (plan, [shares, partials]) in plans.iter().zip(&at.plans) {
            let shares = &words[shares.clone()];
            let pieces = &list[shares[0] as usize * KeyPiece::WORDS..];
            let want: Vec<u32> = plan.pieces.iter().flat_map(KeyPiece::words).collect();
            assert_eq!(pieces[..want.len()], want);
            let from_the_first: Vec<u32> = shares.iter().map(|share| share - shares[0]).collect();
            assert_eq!(from_the_first, plan.shares);
            assert_eq!(words[partials.clone()], plan.partials);
        }
    });
}

/// Each padding row is a sequence that begins, and whose state goes to a slot that nobody reads.
#[test]
fn padding_has_states_of_its_own() {
    let batch = ForwardBatch {
        state_reads: vec![NO_STATE, 4],
        state_writes: vec![2, 4],
        ..decoding(&[3, 5], 1)
    };
    written_batch(&batch, 4, |words, at, _| {
        let of = |range: &Range<usize>| words[range.clone()].to_vec();
        assert_eq!(of(&at.state_starts), [0, 1, 2, 3, 4]);
        assert_eq!(of(&at.state_reads), [NO_STATE, 4, NO_STATE, NO_STATE]);
        assert_eq!(of(&at.state_writes), [2, 4, DUMMY_STATE, DUMMY_STATE]);
    });
}
