//! Reads a release's files and never maps them: a file that is cut or rewritten meanwhile gives an
//! error, and the bytes that were used are those that were hashed, because every byte is read once.

use super::digest::{BLOCK, FileDigest, hash_block};
use crate::error::damaged;
use crate::{Error, Result};
use blake3::hazmat::ChainingValue;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are read at once where nobody needs them in one piece.
const PIECE: usize = 8 << 20;

/// The part of a file which the largest piece has whose memory is kept for others: little beside
/// the weights, and enough for all matrices of a layer in a file of many layers.
const LARGEST_KEPT: usize = 32;

/// The least bytes that each of several threads reads of a piece: starting a thread takes a tenth
/// of the time that these take.
const LEAST_SHARE: usize = 1 << 20;
/// The most threads that read one piece.
const READERS: usize = 8;

/// Bytes that are hashed while they are in a core's cache from being read.
const STEP: usize = 16 * BLOCK;

/// A piece of a file, whose memory is used again when nobody has it any more.
pub(crate) type Bytes = Arc<Vec<u8>>;

/// One file, of which ranges are read in any order. What is hashed are blocks, so one of which only
/// a part was asked for is kept.
pub(crate) struct FileReader {
    path: PathBuf,
    file: File,
    len: usize,
    /// The beginning, in whole blocks, before the first range is read.
    ahead: Vec<u8>,
    /// Whether each block was read.
    was_read: Vec<bool>,
    kept: BTreeMap<usize, Vec<u8>>,
    /// Pieces that were read. The next ones get the memory of those that nobody has any more.
    pieces: Vec<Bytes>,
    digest: Option<(String, FileDigest)>,
}

impl FileReader {
    /// Opens a file. If `blake3` is given, [`Self::finish`] fails unless it is the file's digest.
    pub(crate) fn open(path: &Path, blake3: Option<&str>) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(|source| match source.kind() {
            ErrorKind::NotFound if blake3.is_some() => changed(path, "it is gone"),
            _ => io(source),
        })?;
        let len = file.metadata().map_err(io)?.len();
        let len = usize::try_from(len).map_err(|_| damaged(path, "it is too long"))?;
        if len == 0 {
            return Err(damaged(path, "it is empty"));
        }
        let expect = |blake3: &str| (blake3.to_owned(), FileDigest::new(len));
        Ok(Self {
            path: path.to_owned(),
            file,
            len,
            ahead: Vec::new(),
            was_read: vec![false; len.div_ceil(BLOCK)],
            kept: BTreeMap::new(),
            pieces: Vec::new(),
            digest: blake3.map(expect),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the file when it was opened, bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first `len` bytes, which must lie within the file's length, before any range is read.
    pub(crate) fn peek(&mut self, len: usize) -> Result<&[u8]> {
        let old = self.ahead.len();
        if old < len {
            let wanted = len.max(2 * old).max(4 * BLOCK).next_multiple_of(BLOCK).min(self.len);
            let mut ahead = std::mem::take(&mut self.ahead);
            ahead.resize(wanted, 0);
            self.fill(&mut ahead[old..], old / BLOCK)?;
            self.ahead = ahead;
        }
        Ok(&self.ahead[..len])
    }

    /// Reads a range of the file's length. No byte may be read twice.
    pub(crate) fn read(&mut self, range: Range<usize>) -> Result<Bytes> {
        let peeked = std::mem::take(&mut self.ahead);
        self.kept.extend(peeked.chunks(BLOCK).map(<[u8]>::to_vec).enumerate());
        let mut piece = self.memory(range.len());
        let mut at = range.start;
        while at < range.end {
            let block = at / BLOCK;
            let mut end = self.end_of_run(at, range.end);
            let is_run = end > at;
            if !is_run {
                end = range.end.min((block + 1) * BLOCK);
            }
            let part = &mut piece[at - range.start..end - range.start];
            if is_run {
                self.fill(part, block)?;
            } else {
                part.copy_from_slice(&self.kept(block)?[at % BLOCK..][..end - at]);
            }
            at = end;
        }
        let piece = Arc::new(piece);
        if piece.len() <= self.len / LARGEST_KEPT {
            self.pieces.push(piece.clone());
        }
        Ok(piece)
    }

    /// The end of the whole blocks between `at` and `end` that follow each other and were not read.
    fn end_of_run(&self, at: usize, end: usize) -> usize {
        let whole = if end == self.len { self.was_read.len() } else { end / BLOCK };
        match self.was_read.get(at / BLOCK..whole) {
            Some(blocks) if at.is_multiple_of(BLOCK) => {
                let count = blocks.iter().take_while(|read| !**read).count();
                (at + count * BLOCK).min(self.len)
            }
            _ => at,
        }
    }

    /// A block of which a part is asked for. It is read at the first time.
    fn kept(&mut self, block: usize) -> Result<&[u8]> {
        if !self.kept.contains_key(&block) {
            let mut bytes = vec![0; BLOCK.min(self.len - block * BLOCK)];
            self.fill(&mut bytes, block)?;
            self.kept.insert(block, bytes);
        }
        Ok(&self.kept[&block])
    }

    /// A piece of some length, in memory of an earlier one if possible: new memory would cost the
    /// system as long as reading the file does.
    fn memory(&mut self, len: usize) -> Vec<u8> {
        let is_wanted = len <= self.len / LARGEST_KEPT;
        let is_free = |piece: &Bytes| is_wanted && Arc::strong_count(piece) == 1;
        let free = self.pieces.iter().position(is_free);
        match free.and_then(|i| Arc::into_inner(self.pieces.swap_remove(i))) {
            Some(mut memory) => {
                memory.resize(len, 0);
                memory
            }
            None => vec![0; len],
        }
    }

    /// Reads and hashes whole blocks from the one with the number `first` on; several threads share
    /// a large piece. The system gives new memory only when it is written, so they share that work
    /// too.
    fn fill(&mut self, into: &mut [u8], first: usize) -> Result<()> {
        let blocks = into.len().div_ceil(BLOCK);
        let was_read = &mut self.was_read[first..][..blocks];
        assert!(!was_read.contains(&true), "invariant: no byte is read twice");
        was_read.fill(true);
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(READERS);
        let share = blocks.div_ceil(threads).max(LEAST_SHARE / BLOCK);
        let (file, len) = (&self.file, self.len);
        let places = self.digest.as_mut().map_or(&mut [][..], |(_, digest)| digest.places(first));
        let read = if blocks <= share {
            read_blocks(file, len, first, into, places)
        } else {
            let mut places = places.chunks_mut(share);
            let shares = (first..).step_by(share).zip(into.chunks_mut(share * BLOCK));
            std::thread::scope(|scope| {
                let start = |(first, own)| {
                    let places = places.next().unwrap_or_default();
                    scope.spawn(move || read_blocks(file, len, first, own, places))
                };
                let readers: Vec<_> = shares.map(start).collect();
                let panicked = |_| Err(std::io::Error::other("a reader panicked"));
                readers.into_iter().try_for_each(|reader| reader.join().unwrap_or_else(panicked))
            })
        };
        read.map_err(|source| match source.kind() {
            ErrorKind::UnexpectedEof => {
                let len = self.len;
                let what = format!("it had {len} bytes and was cut short while it was read");
                damaged(&self.path, &what)
            }
            _ => Error::Io { path: self.path.clone(), source },
        })
    }

    /// Reads the whole file, at most `bytes_per_second` of it a second, and compares its digest.
    pub(super) fn check(mut self, bytes_per_second: u64) -> Result<()> {
        for at in (0..self.len).step_by(PIECE) {
            let piece = self.read(at..self.len.min(at + PIECE))?.len();
            let share = piece as f64 / bytes_per_second.max(1) as f64;
            std::thread::sleep(Duration::from_secs_f64(share));
        }
        self.finish()
    }

    /// Reads the rest of the file and compares its digest with the expected one, if there is one.
    pub(crate) fn finish(mut self) -> Result<()> {
        let mut block = 0;
        while let Some(read_before) = self.was_read[block..].iter().position(|read| !read) {
            block += read_before;
            let at = block * BLOCK;
            self.read(at..self.end_of_run(at, self.len).min(at + PIECE))?;
        }
        let Some((blake3, digest)) = self.digest else { return Ok(()) };
        let found = digest.root().to_hex();
        if found.as_str() == blake3 {
            return Ok(());
        }
        let what = format!("its BLAKE3 digest is {found}, that of the qualified file is {blake3}");
        Err(changed(&self.path, &what))
    }
}

/// Reads whole blocks of a file of `len` bytes, from the one with the number `first` on, and hashes
/// as many of them as there are places for digests.
fn read_blocks(
    file: &File,
    len: usize,
    first: usize,
    into: &mut [u8],
    places: &mut [ChainingValue],
) -> std::io::Result<()> {
    let mut places = (first..).zip(places);
    for (step, start) in into.chunks_mut(STEP).zip((first * BLOCK..).step_by(STEP)) {
        file.read_exact_at(step, start as u64)?;
        // The blocks stand first: where they end, `zip` takes no place from the next step.
        for (block, (number, place)) in step.chunks(BLOCK).zip(&mut places) {
            *place = hash_block(block, number, len);
        }
    }
    Ok(())
}

pub(super) fn changed(path: &Path, what: &str) -> Error {
    let path = path.display();
    Error::Changed(format!("{path} is not the file that was qualified: {what}; fetch it again"))
}

/// The tensors of one file, which are read when they are asked for: no tensor waits in memory for
/// its turn.
pub(super) struct TensorReader {
    file: FileReader,
    untaken: BTreeMap<String, Range<usize>>,
}

impl TensorReader {
    /// `tensors` are names and byte ranges, which lie within the file and do not overlap.
    pub(crate) fn new(
        file: FileReader,
        tensors: impl Iterator<Item = (String, Range<usize>)>,
    ) -> Self {
        Self { file, untaken: tensors.collect() }
    }

    /// A tensor's bytes. Each may be taken once.
    pub(crate) fn take(&mut self, name: &str) -> Result<Bytes> {
        let range = self.untaken.remove(name).expect("invariant: each tensor is taken once");
        self.file.read(range)
    }

    pub(crate) fn finish(self) -> Result<()> {
        self.file.finish()
    }
}
