//! The BLAKE3 digest of a file whose blocks are read in any order: a thread hashes each block by
//! itself, and the tree of the digest is put together at the end.

use super::file::Bytes;
use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use blake3::{Hash, Hasher};
use std::ops::Range;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Bytes of a block: a subtree of sixteen chunks, which vector instructions hash side by side.
pub(super) const BLOCK: usize = 16 << 10;

/// Whole blocks of the file, the last of which may be shorter.
pub(super) struct ReadBlocks {
    pub piece: Bytes,
    /// Their place in the piece.
    pub range: Range<usize>,
    pub first_block: usize,
}

/// Hashing runs beside the packing of weights, so it costs no time as long as a core is free for
/// it.
pub(super) struct FileDigest {
    parts: SyncSender<Vec<ReadBlocks>>,
    thread: JoinHandle<Hash>,
}

impl FileDigest {
    /// Starts the digest of a file of `len` bytes.
    pub(super) fn start(len: usize) -> std::io::Result<Self> {
        // Without a queue at most two pieces are in memory, however large tensors are: the one that
        // is hashed and the one that is packed.
        let (parts, received) = sync_channel(0);
        let hash = move || hash_parts(&received, len);
        let thread = std::thread::Builder::new().name("hash".into()).spawn(hash)?;
        Ok(Self { parts, thread })
    }

    /// Adds blocks. Each block of the file is added once.
    pub(super) fn add(&self, parts: Vec<ReadBlocks>) {
        // The thread ends before its channel only by a panic, which `finish` reports.
        let _ = self.parts.send(parts);
    }

    /// The digest, when all blocks were added; `None` after a panic.
    pub(super) fn finish(self) -> Option<Hash> {
        drop(self.parts);
        self.thread.join().ok()
    }
}

fn hash_parts(received: &Receiver<Vec<ReadBlocks>>, len: usize) -> Hash {
    let mut values = vec![ChainingValue::default(); len.div_ceil(BLOCK)];
    for ReadBlocks { piece, range, first_block } in received.iter().flatten() {
        let blocks = piece[range].chunks(BLOCK);
        if values.len() == 1 {
            return blocks.map(blake3::hash).next().expect("invariant: no part is empty");
        }
        for (number, block) in (first_block..).zip(blocks) {
            let mut hasher = Hasher::new();
            hasher.set_input_offset((number * BLOCK) as u64).update(block);
            values[number] = hasher.finalize_non_root();
        }
    }
    let (left, right) = values.split_at(left_blocks(values.len()));
    merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
}

/// The blocks of the left one of two subtrees: the largest power of two below the number of both.
fn left_blocks(count: usize) -> usize {
    count.next_power_of_two() / 2
}

fn subtree(values: &[ChainingValue]) -> ChainingValue {
    let [value] = values else {
        let (left, right) = values.split_at(left_blocks(values.len()));
        return merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash);
    };
    *value
}
