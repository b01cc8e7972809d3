//! Reads a release's files and never maps them: a file that is cut or rewritten meanwhile gives an
//! error, and the bytes that were used are those that were hashed, because every byte is read once.

use super::damaged;
use super::digest::{BLOCK, FileDigest, ReadBlocks};
use crate::{Error, Result};
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
const PIECE: usize = 1 << 20;

/// Bytes of the largest piece whose memory is kept for others.
const KEPT: usize = 32 << 20;

/// Bytes that one thread reads of a piece. Reading a larger one into new memory takes one thread
/// about a second for 1.3 GB, most of it in the system, and several share the work well.
const PART: usize = 8 << 20;
/// The most threads that read one piece.
const READERS: usize = 8;

/// A piece of a file. It is shared with the thread that hashes it.
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
    kept: BTreeMap<usize, Bytes>,
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
        let expect = |blake3: &str| Ok((blake3.to_owned(), FileDigest::start(len)?));
        Ok(Self {
            path: path.to_owned(),
            file,
            len,
            ahead: Vec::new(),
            was_read: vec![false; len.div_ceil(BLOCK)],
            kept: BTreeMap::new(),
            pieces: Vec::new(),
            digest: blake3.map(expect).transpose().map_err(io)?,
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
            let wanted = len.max(2 * old).max(PIECE / 16).next_multiple_of(BLOCK).min(self.len);
            let mut ahead = std::mem::take(&mut self.ahead);
            ahead.resize(wanted, 0);
            self.fill(&mut ahead[old..], old)?;
            self.ahead = ahead;
        }
        Ok(&self.ahead[..len])
    }

    /// Reads a range of the file's length. No byte may be read twice.
    pub(crate) fn read(&mut self, range: Range<usize>) -> Result<Bytes> {
        let (mut parts, mut runs) = (self.keep_peeked(), Vec::new());
        let mut piece = self.memory(range.len());
        let mut at = range.start;
        while at < range.end {
            let (first_block, from) = (at / BLOCK, at - range.start);
            let mut end = self.end_of_run(at, range.end);
            if end > at {
                self.fill(&mut piece[from..end - range.start], at)?;
                self.was_read[first_block..end.div_ceil(BLOCK)].fill(true);
                runs.push((from..end - range.start, first_block));
            } else {
                end = range.end.min((first_block + 1) * BLOCK);
                parts.extend(self.keep(first_block)?);
                let kept = &self.kept[&first_block][at % BLOCK..][..end - at];
                piece[from..end - range.start].copy_from_slice(kept);
            }
            at = end;
        }
        let piece = Arc::new(piece);
        if piece.len() <= KEPT {
            self.pieces.push(piece.clone());
        }
        let of_piece =
            |(range, first_block)| ReadBlocks { piece: piece.clone(), range, first_block };
        self.hash(parts.into_iter().chain(runs.into_iter().map(of_piece)).collect());
        Ok(piece)
    }

    fn hash(&self, parts: Vec<ReadBlocks>) {
        if let Some((_, digest)) = &self.digest {
            digest.add(parts);
        }
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

    /// Reads a block of which a part is asked for, unless it is kept already. Returns what is new
    /// to the digest.
    fn keep(&mut self, first_block: usize) -> Result<Option<ReadBlocks>> {
        if self.kept.contains_key(&first_block) {
            return Ok(None);
        }
        assert!(!self.was_read[first_block], "invariant: no byte is read twice");
        let start = first_block * BLOCK;
        let mut bytes = vec![0; BLOCK.min(self.len - start)];
        self.fill(&mut bytes, start)?;
        self.was_read[first_block] = true;
        let piece = Arc::new(bytes);
        self.kept.insert(first_block, piece.clone());
        Ok(Some(ReadBlocks { range: 0..piece.len(), piece, first_block }))
    }

    /// Keeps the blocks that were peeked. Returns what is new to the digest.
    fn keep_peeked(&mut self) -> Vec<ReadBlocks> {
        let piece = Arc::new(std::mem::take(&mut self.ahead));
        for (block, bytes) in piece.chunks(BLOCK).enumerate() {
            self.was_read[block] = true;
            self.kept.insert(block, Arc::new(bytes.to_vec()));
        }
        let part = ReadBlocks { range: 0..piece.len(), piece, first_block: 0 };
        if part.range.is_empty() { Vec::new() } else { vec![part] }
    }

    /// A piece of some length, in memory of an earlier one if possible: new memory would cost the
    /// system as long as reading the file does.
    fn memory(&mut self, len: usize) -> Vec<u8> {
        let is_free = |piece: &Bytes| len <= KEPT && Arc::strong_count(piece) == 1;
        let free = self.pieces.iter().position(is_free);
        match free.and_then(|i| Arc::into_inner(self.pieces.swap_remove(i))) {
            Some(mut memory) => {
                memory.resize(len, 0);
                memory
            }
            None => vec![0; len],
        }
    }

    /// Reads what the file has at a position; several threads read a large piece. The system gives
    /// memory of zeros only when it is written, so these threads share that work too.
    fn fill(&self, into: &mut [u8], at: usize) -> Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(READERS);
        let part = if into.len() > KEPT { into.len().div_ceil(threads).max(PART) } else { KEPT };
        let read =
            |(i, own): (usize, &mut [u8])| self.file.read_exact_at(own, (at + i * part) as u64);
        let mut parts = into.chunks_mut(part).enumerate();
        let first = parts.next();
        let read = std::thread::scope(|scope| {
            let readers: Vec<_> = parts.map(|one| scope.spawn(move || read(one))).collect();
            first.map_or(Ok(()), read)?;
            readers.into_iter().try_for_each(|reader| {
                reader.join().unwrap_or_else(|_| Err(std::io::Error::other("a reader panicked")))
            })
        });
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
        let found = digest.finish().ok_or_else(|| damaged(&self.path, "it could not be hashed"))?;
        let found = found.to_hex();
        if found.as_str() == blake3 {
            return Ok(());
        }
        let what = format!("its BLAKE3 digest is {found}, that of the qualified file is {blake3}");
        Err(changed(&self.path, &what))
    }
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
