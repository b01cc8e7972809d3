//! The BLAKE3 digest of a file whose blocks are read in any order: each block is hashed by itself,
//! and the tree of the digest is put together at the end.

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use blake3::{Hash, Hasher};

/// Bytes of a block: a subtree of sixteen chunks, which vector instructions hash side by side.
pub(super) const BLOCK: usize = 16 << 10;

/// The digests of a file's blocks, of which the last may be shorter. Threads that read different
/// blocks write them side by side.
pub(super) struct FileDigest(Vec<ChainingValue>);

impl FileDigest {
    /// For a file of `len` bytes.
    pub(super) fn new(len: usize) -> Self {
        Self(vec![ChainingValue::default(); len.div_ceil(BLOCK)])
    }

    /// The places for the digests of all blocks from `first` on. [`hash_block`] makes them.
    pub(super) fn places(&mut self, first: usize) -> &mut [ChainingValue] {
        &mut self.0[first..]
    }

    /// The file's digest, when all places are filled.
    pub(super) fn root(&self) -> Hash {
        if let [only] = self.0[..] {
            return only.into();
        }
        let (left, right) = self.0.split_at(left_blocks(self.0.len()));
        merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
    }
}

/// The digest of one block in a file of `len` bytes.
pub(super) fn hash_block(block: &[u8], number: usize, len: usize) -> ChainingValue {
    if len <= BLOCK {
        return blake3::hash(block).into();
    }
    let mut hasher = Hasher::new();
    hasher.set_input_offset((number * BLOCK) as u64).update(block);
    hasher.finalize_non_root()
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
