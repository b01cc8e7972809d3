//! Device memory as typed ranges.

use crate::Result;
use crate::error::ensure;
use half::bf16;
use std::ops::Range;

/// Element types of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    F32,
    Bf16,
    /// Used only in the machine's own memory.
    F16,
    U32,
    U64,
    U8,
}

impl Kind {
    /// Size of an element in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::U32 => 4,
            Self::U64 => 8,
        }
    }

    /// The kernel for activations of this kind.
    pub(crate) fn kernel(self, f32: &'static str, bf16: &'static str) -> &'static str {
        if self == Self::Bf16 { bf16 } else { f32 }
    }

    /// The ending of the names of kernels for this kind.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::U8 => "u8",
        }
    }
}

/// A contiguous range of elements in a device's memory. It is plain data: the owner of the
/// allocation keeps it alive until the work that uses the view is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    address: u64,
    len: usize,
    kind: Kind,
}

impl View {
    pub(crate) fn new(address: u64, len: usize, kind: Kind) -> Self {
        Self { address, len, kind }
    }

    pub fn address(self) -> u64 {
        self.address
    }

    /// Length in elements.
    pub fn len(self) -> usize {
        self.len
    }

    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    pub fn kind(self) -> Kind {
        self.kind
    }

    /// Length in bytes.
    pub fn bytes(self) -> usize {
        self.len * self.kind.bytes()
    }

    /// Bytes in pairs, for kernels that take them in place of bf16; other views as they are.
    pub(crate) fn in_pairs(self) -> Self {
        match self.kind {
            Kind::U8 => Self::new(self.address, self.len / 2, Kind::Bf16),
            _ => self,
        }
    }

    /// The elements in `range`.
    ///
    /// # Panics
    /// When the range is not inside the view.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of a view of {} elements",
            self.len
        );
        Self::new(self.address + (range.start * self.kind.bytes()) as u64, range.len(), self.kind)
    }

    /// Whether the two have bytes in common.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        let end = |view: Self| view.address + view.bytes() as u64;
        self.address < end(other) && other.address < end(self)
    }

    /// The same bytes, viewed as elements of another kind.
    ///
    /// # Panics
    /// When the bytes are not a whole number of elements, or not aligned to one.
    #[must_use]
    pub fn cast(self, kind: Kind) -> Self {
        let bytes = self.bytes();
        assert!(
            bytes.is_multiple_of(kind.bytes()) && self.address.is_multiple_of(kind.bytes() as u64),
            "{bytes} bytes at {:#x} as {kind:?}",
            self.address
        );
        Self::new(self.address, bytes / kind.bytes(), kind)
    }
}

/// A host type that corresponds to a kind of device elements.
pub trait DeviceElement: Copy {
    const KIND: Kind;
    /// Writes the values to bytes as they lie in the device's memory.
    fn encode(values: &[Self], bytes: &mut [u8]);
    /// Reads as many values as the bytes hold.
    fn decode(bytes: &[u8]) -> Vec<Self>;
}

macro_rules! element {
    ($($type:ty => $kind:ident),*) => { $(
        impl DeviceElement for $type {
            const KIND: Kind = Kind::$kind;

            fn encode(values: &[Self], bytes: &mut [u8]) {
                for (value, bytes) in values.iter().zip(bytes.chunks_exact_mut(size_of::<Self>())) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }

            fn decode(bytes: &[u8]) -> Vec<Self> {
                let (values, _) = bytes.as_chunks();
                values.iter().map(|bytes| Self::from_le_bytes(*bytes)).collect()
            }
        }
    )* };
}

element!(f32 => F32, bf16 => Bf16, u32 => U32, u64 => U64, u8 => U8);

/// Pinned host memory, from and to which a device copies without the CPU.
pub struct Staging {
    start: *mut u8,
    len: usize,
    free: Option<Box<dyn FnOnce() + Send>>,
}

// SAFETY: it owns its memory, as a `Box<[u8]>` does.
unsafe impl Send for Staging {}
// SAFETY: as above; shared references only read.
unsafe impl Sync for Staging {}

impl Staging {
    /// # Safety
    /// `start` points to `len` initialised bytes that no other code uses until `free` is called.
    pub(crate) unsafe fn new(
        start: *mut u8,
        len: usize,
        free: impl FnOnce() + Send + 'static,
    ) -> Self {
        Self { start, len, free: Some(Box::new(free)) }
    }

    /// The content. A download must have been waited for.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: by the promise given to `new`. Callers wait for a copy by the device before they
        // read.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The content, for writing. An upload must have been waited for.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// The content as words of the machine's byte order. Up to three bytes at the end are left out.
    ///
    /// # Panics
    /// When the memory is not aligned to words; that of devices and allocators always is.
    pub fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: any four bytes are a valid word.
        let (before, words, _) = unsafe { self.bytes_mut().align_to_mut() };
        assert!(before.is_empty(), "staging buffers are aligned");
        words
    }

    /// The address of `bytes` bytes from `offset` on.
    ///
    /// # Errors
    /// When they are not inside the buffer.
    pub(crate) fn address(&self, offset: usize, bytes: usize) -> Result<*mut u8> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.len);
        ensure("copy", inside, || {
            format!("{bytes} bytes at {offset} of a staging buffer of {}", self.len)
        })?;
        Ok(self.start.wrapping_add(offset))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Some(free) = self.free.take() {
            free();
        }
    }
}
