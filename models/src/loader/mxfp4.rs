//! MXFP4 in Hugging Face's files: the codes of a tensor and its scales are in tensors of their own.

/// The ends of the names of the two. Codes are `[…, blocks, 16]` bytes, scales `[…, blocks]`.
pub(super) const CODES: &str = "_blocks";
pub(super) const SCALES: &str = "_scales";
/// Values of a block, and the bytes of their codes.
const VALUES: usize = 32;
const BYTES: usize = VALUES / 2;

/// The shape of a tensor with codes and scales of these shapes, `[…, 32 * blocks]`.
pub(super) fn shape(codes: &[usize], scales: &[usize]) -> Option<Vec<usize>> {
    let (bytes, blocks) = codes.split_last()?;
    let (last, heights) = blocks.split_last()?;
    let width = last.checked_mul(VALUES)?;
    (*bytes == BYTES && blocks == scales).then(|| [heights, &[width]].concat())
}

/// The blocks as GGUF has them: a scale, and then codes of which byte j holds those of the values j
/// and j + 16. Here byte j holds those of 2j and 2j + 1, the first in its low half, as there.
pub(super) fn blocks(codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(codes.len() + scales.len());
    for (codes, scale) in codes.as_chunks::<BYTES>().0.iter().zip(scales) {
        let code = |value: usize| codes[value / 2] >> (4 * (value % 2)) & 15;
        out.push(*scale);
        out.extend((0..BYTES).map(|j| code(j) | code(j + BYTES) << 4));
    }
    out
}
