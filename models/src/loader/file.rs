//! Reads a release's files once, from the beginning to the end, and never maps them: a file that is
//! cut or rewritten meanwhile gives an error, and the bytes that were used are those that were
//! hashed.

use super::damaged;
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;
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

/// One file, read in order.
pub(crate) struct FileReader {
    path: PathBuf,
    file: File,
    len: usize,
    /// Bytes that were read and not yet taken.
    ahead: Vec<u8>,
    /// Pieces that were taken. The next ones get the memory of those that nobody has any more.
    taken: Vec<Bytes>,
    /// Position of the first byte that was not taken.
    at: usize,
    digest: Option<ExpectedDigest>,
}

/// The BLAKE3 digest that a file must have, and the thread that computes the one it has. Hashing
/// runs beside the packing of weights, so it costs no time as long as a core is free for it.
struct ExpectedDigest {
    blake3: String,
    pieces: SyncSender<Bytes>,
    thread: JoinHandle<blake3::Hash>,
}

impl ExpectedDigest {
    fn start(blake3: &str) -> std::io::Result<Self> {
        // Without a queue at most two pieces are in memory, however large tensors are: the one that
        // is hashed and the one that is packed.
        let (pieces, received) = sync_channel::<Bytes>(0);
        let hash = move || {
            let mut hasher = blake3::Hasher::new();
            for piece in received {
                hasher.update(&piece);
            }
            hasher.finalize()
        };
        let thread = std::thread::Builder::new().name("hash".into()).spawn(hash)?;
        Ok(Self { blake3: blake3.to_owned(), pieces, thread })
    }
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
        let digest = blake3.map(ExpectedDigest::start).transpose().map_err(io)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            len,
            ahead: Vec::new(),
            taken: Vec::new(),
            at: 0,
            digest,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Length of the file when it was opened, bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The next `len` bytes, which stay untaken. They must lie within the file's length.
    pub(crate) fn peek(&mut self, len: usize) -> Result<&[u8]> {
        if self.ahead.len() < len {
            let most = self.len - self.at;
            let wanted = len.max(2 * self.ahead.len()).max(PIECE / 16).min(most);
            let mut ahead = std::mem::take(&mut self.ahead);
            self.fill(&mut ahead, wanted)?;
            self.ahead = ahead;
        }
        Ok(&self.ahead[..len])
    }

    /// Takes the next `len` bytes. They must lie within the file's length.
    pub(crate) fn take(&mut self, len: usize) -> Result<Bytes> {
        let piece = if self.ahead.is_empty() && len > PART.max(KEPT) {
            self.large_piece(len)?
        } else {
            let mut piece = self.free_memory();
            piece.extend(self.ahead.drain(..self.ahead.len().min(len)));
            self.fill(&mut piece, len)?;
            piece
        };
        self.at += len;
        let piece = Arc::new(piece);
        if len <= KEPT {
            self.taken.push(piece.clone());
        }
        if let Some(digest) = &self.digest {
            // The thread ends before its channel only by a panic, which `finish` reports.
            let _ = digest.pieces.send(piece.clone());
        }
        Ok(piece)
    }

    /// An empty piece, in memory of an earlier one if possible: new memory would cost the system as
    /// long as reading the file does.
    fn free_memory(&mut self) -> Vec<u8> {
        let free = self.taken.iter().position(|piece| Arc::strong_count(piece) == 1);
        let piece = free.and_then(|i| Arc::into_inner(self.taken.swap_remove(i)));
        piece.map_or_else(Vec::new, |mut memory| {
            memory.clear();
            memory
        })
    }

    /// Reads the next `len` bytes by several threads. The system gives memory of zeros only when it
    /// is written, so these threads share that work too.
    fn large_piece(&mut self, len: usize) -> Result<Vec<u8>> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        let mut piece = vec![0; len];
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(READERS);
        let part = len.div_ceil(threads).max(PART);
        let (file, from) = (&self.file, self.at as u64);
        let read = std::thread::scope(|scope| {
            let parts = piece.chunks_mut(part).enumerate();
            let read =
                |(i, own): (usize, &mut [u8])| file.read_exact_at(own, from + (i * part) as u64);
            let readers: Vec<_> = parts.map(|one| scope.spawn(move || read(one))).collect();
            readers.into_iter().try_for_each(|reader| {
                reader.join().unwrap_or_else(|_| Err(std::io::Error::other("a reader panicked")))
            })
        });
        match read {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(self.cut_short()),
            other => other.map_err(io)?,
        }
        self.file.seek(SeekFrom::Start(from + len as u64)).map_err(io)?;
        Ok(piece)
    }

    fn cut_short(&self) -> Error {
        let what = format!("it had {} bytes and was cut short while it was read", self.len);
        damaged(&self.path, &what)
    }

    /// Reads on until `into` has `len` bytes.
    fn fill(&mut self, into: &mut Vec<u8>, len: usize) -> Result<()> {
        let io = |source| Error::Io { path: self.path.clone(), source };
        let more = len - into.len();
        into.reserve_exact(more);
        self.file.by_ref().take(more as u64).read_to_end(into).map_err(io)?;
        if into.len() < len { Err(self.cut_short()) } else { Ok(()) }
    }

    /// Reads the file to its end, at most `bytes_per_second` of it a second, and compares its
    /// digest.
    pub(super) fn check(mut self, bytes_per_second: u64) -> Result<()> {
        while self.at < self.len {
            let piece = self.take(PIECE.min(self.len - self.at))?.len();
            let share = piece as f64 / bytes_per_second.max(1) as f64;
            std::thread::sleep(Duration::from_secs_f64(share));
        }
        self.finish()
    }

    /// Takes what lies before `position` and drops it.
    fn skip_to(&mut self, position: usize) -> Result<()> {
        while self.at < position {
            self.take(PIECE.min(position - self.at))?;
        }
        Ok(())
    }

    /// Reads the rest of the file and compares its digest with the expected one.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.skip_to(self.len)?;
        let Some(ExpectedDigest { blake3, pieces, thread }) = self.digest else { return Ok(()) };
        drop(pieces);
        let found = thread.join().map_err(|_| damaged(&self.path, "it could not be hashed"))?;
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

/// The tensors of one file. The file is read in its own order, and a tensor that lies before the
/// one asked for is kept until it is asked for. Each tensor is in memory in one form only, as it
/// was read or as it was packed, so a load takes no more than its result, however tensors are
/// ordered.
pub(super) struct TensorReader {
    file: FileReader,
    /// The tensors that were not read yet, by their place in the file. Empty ones share theirs.
    unread: BTreeMap<(usize, String), Range<usize>>,
    kept: BTreeMap<String, Bytes>,
    unused: BTreeSet<String>,
}

impl TensorReader {
    /// `tensors` are names and byte ranges, which lie within the file and behind what was taken.
    pub(crate) fn new(
        file: FileReader,
        tensors: impl Iterator<Item = (String, Range<usize>)>,
    ) -> Self {
        let unread = tensors.map(|(name, range)| ((range.start, name), range)).collect();
        Self { file, unread, kept: BTreeMap::new(), unused: BTreeSet::new() }
    }

    /// The tensor will not be asked for.
    pub(crate) fn ignore(&mut self, name: &str) {
        self.unused.insert(name.to_owned());
    }

    /// A tensor's bytes. Each may be taken once.
    pub(crate) fn take(&mut self, name: &str) -> Result<Bytes> {
        if let Some(bytes) = self.kept.remove(name) {
            return Ok(bytes);
        }
        loop {
            let next = self.unread.pop_first();
            let ((_, next), range) = next.expect("invariant: each tensor is taken once");
            self.file.skip_to(range.start)?;
            if self.unused.contains(&next) {
                continue;
            }
            let bytes = self.file.take(range.len())?;
            if next == name {
                return Ok(bytes);
            }
            self.kept.insert(next, bytes);
        }
    }

    pub(crate) fn finish(self) -> Result<()> {
        drop(self.kept);
        self.file.finish()
    }
}
