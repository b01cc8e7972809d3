//! Answers as they are stored for replays. Long ones are compressed, because log-probabilities tell
//! each text twice and their numbers as text: with twenty candidates a token they then take less
//! than a fifth of the room.

use crate::{StoreError, StoreResult};
use bytes::Bytes;
use cresset_base::UnixMillis;
use cresset_ledger::ReceiptFacts;
use miniz_oxide::deflate::compress_to_vec;
use miniz_oxide::inflate::decompress_to_vec_with_limit;
use std::panic;
use std::sync::Arc;
use tokio::task::spawn_blocking;

/// Shorter answers are stored as they are: setting up the compressor, which takes about 30 µs,
/// would cost more than the room it saves.
const MIN_COMPRESSED: usize = 1 << 10;
/// Compressing this many bytes takes a millisecond, which the threads that serve connections can
/// spare. More are compressed on a thread that may take its time.
const MAX_ON_WORKER: usize = 32 << 10;
/// With twenty candidates a token, this level takes about 25 µs a token and makes 1 460 bytes 285.
/// The fastest one takes 10 µs and makes them 395; level 6 takes 65 µs and makes them 255.
const LEVEL: u8 = 3;

/// An answer, stored so that a repeated request gets the same bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBody {
    pub expires_at: UnixMillis,
    pub(super) content: StoredContent,
    /// What its receipt is made from; `None` for an answer of a model that is being qualified.
    pub receipt: Option<Arc<ReceiptFacts>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StoredContent {
    Plain(Bytes),
    Deflated { plain_bytes: u32, bytes: Bytes },
}

impl StoredBody {
    /// The stored form of an answer.
    pub async fn of(content: Bytes, expires_at: UnixMillis) -> Self {
        let size = content.len();
        let content = off_worker(size, move || StoredContent::of(content)).await;
        Self { expires_at, content, receipt: None }
    }

    /// The same answer with what its receipt is made from.
    #[must_use]
    pub fn with_receipt(self, receipt: Option<ReceiptFacts>) -> Self {
        Self { receipt: receipt.map(Arc::new), ..self }
    }

    /// Bytes of the answer as it is stored.
    pub fn stored_bytes(&self) -> usize {
        let (StoredContent::Plain(bytes) | StoredContent::Deflated { bytes, .. }) = &self.content;
        bytes.len()
    }

    /// The answer, byte for byte as it was when it was stored.
    pub(super) async fn answer(self) -> StoreResult<Bytes> {
        match self.content {
            StoredContent::Plain(bytes) => Ok(bytes),
            StoredContent::Deflated { plain_bytes, bytes } => {
                let size = plain_bytes as usize;
                off_worker(size, move || inflate(&bytes, size)).await
            }
        }
    }
}

impl StoredContent {
    pub(super) fn of(content: Bytes) -> Self {
        let plain_bytes = u32::try_from(content.len()).ok();
        let Some(plain_bytes) = plain_bytes.filter(|_| content.len() >= MIN_COMPRESSED) else {
            return Self::Plain(content);
        };
        let bytes = compress_to_vec(&content, LEVEL);
        if bytes.len() >= content.len() {
            return Self::Plain(content);
        }
        Self::Deflated { plain_bytes, bytes: bytes.into() }
    }
}

fn inflate(bytes: &[u8], size: usize) -> StoreResult<Bytes> {
    match decompress_to_vec_with_limit(bytes, size) {
        Ok(content) if content.len() == size => Ok(content.into()),
        _ => Err(StoreError::Unavailable("a stored answer cannot be decompressed".into())),
    }
}

/// Runs `work` over this many bytes where it keeps nobody waiting.
async fn off_worker<T: Send + 'static>(
    size: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    if size <= MAX_ON_WORKER {
        return work();
    }
    let done = spawn_blocking(work).await;
    done.unwrap_or_else(|error| panic::resume_unwind(error.into_panic()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that are stored of an answer, which must come back as it was.
    fn stored(content: &[u8]) -> usize {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let body = StoredBody::of(content.to_vec().into(), UnixMillis(0)).await;
            let size = match &body.content {
                StoredContent::Plain(bytes) | StoredContent::Deflated { bytes, .. } => bytes.len(),
            };
            assert_eq!(body.answer().await.unwrap(), content);
            size
        })
    }

    #[test]
    fn answers_come_back_byte_for_byte_and_never_take_more_room() {
        let mut random = vec![0; 100_000];
        getrandom::fill(&mut random).unwrap();
        for length in [0, 1, MIN_COMPRESSED - 1, MIN_COMPRESSED, MAX_ON_WORKER + 1, random.len()] {
            assert_eq!(stored(&random[..length]), length);
            let even = stored(&vec![b'a'; length]);
            assert!(if length < MIN_COMPRESSED { even == length } else { even < length / 10 });
        }
    }

    #[test]
    fn an_answer_that_was_cut_is_an_error() {
        let StoredContent::Deflated { plain_bytes, bytes } =
            StoredContent::of(vec![b'a'; 5_000].into())
        else {
            panic!("it is stored as it is")
        };
        let size = plain_bytes as usize;
        assert!(inflate(&bytes, size).is_ok());
        assert!(inflate(&bytes[..bytes.len() - 1], size).is_err());
        assert!(inflate(&bytes, size - 1).is_err() && inflate(&bytes, size + 1).is_err());
    }
}
