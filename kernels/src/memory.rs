//! Memory in pages of 2 MiB where the system has them. A token reads every weight once, so it takes
//! as long as reading memory does, and with pages of 4 KiB the look-ups of addresses add more than
//! half of that time: 42 GB/s instead of 73 on the machine of `RESULTS.md`.

use crate::Compute;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

const PAGE: usize = 2 << 20;
/// Bytes of a region. Most weights are smaller than a page, so they are cut from regions, each of
/// which exists as long as any of the ranges that were cut from it.
const REGION: usize = 8 << 20;
/// Ranges start at cache lines.
const ALIGN: usize = 64;

/// Asks the system for large pages under memory that has not been written yet. Without them
/// everything works, only more slowly.
pub(crate) fn prefer_large_pages<T>(memory: &[T]) {
    advise(memory.as_ptr().cast_mut().cast(), size_of_val(memory));
}

/// Advice applies to whole small pages, so the partial ones at the ends are left out.
#[cfg(target_os = "linux")]
fn advise(start: *mut u8, bytes: usize) {
    const SMALL_PAGE: usize = 4096;
    let skipped = start.align_offset(SMALL_PAGE);
    let whole = bytes.saturating_sub(skipped) / SMALL_PAGE * SMALL_PAGE;
    if whole > 0 {
        // SAFETY: this advice changes no contents, and the range lies within the memory. A refusal
        // leaves small pages.
        let _ = unsafe {
            rustix::mm::madvise(
                start.wrapping_add(skipped).cast(),
                whole,
                rustix::mm::Advice::LinuxHugepage,
            )
        };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_: *mut u8, _: usize) {}

/// Memory that is aligned to large pages, in which ranges are cut.
struct Region {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it is plain memory, and the ranges that are cut from it are disjoint.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn new(bytes: usize) -> Self {
        let layout = Self::layout(bytes);
        // SAFETY: the layout is not empty.
        let start = unsafe { std::alloc::alloc(layout) };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        advise(start.as_ptr(), bytes);
        Self { start, bytes }
    }

    fn layout(bytes: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(bytes, PAGE)
            .expect("invariant: a size that fits memory")
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated so in `new`.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), Self::layout(self.bytes)) };
    }
}

/// The region from which the next ranges are cut, and the number of its bytes that are taken.
static OPEN: Mutex<(Weak<Region>, usize)> = Mutex::new((Weak::new(), 0));

/// A range of bytes in a region. It owns the range alone and keeps the region alive.
pub(crate) struct RegionBytes {
    region: Arc<Region>,
    start: usize,
    bytes: usize,
}

impl RegionBytes {
    pub(crate) fn zeroed(bytes: usize) -> Self {
        let mut block = Self::cut(bytes);
        block.fill(0);
        block
    }

    /// Has each `len` bytes written by a task, which finds zeros and is told where they start. The
    /// threads that write the memory are the ones that get it from the system, page by page.
    pub(crate) fn written(
        c: &Compute,
        bytes: usize,
        len: usize,
        write: impl Fn(usize, &mut [u8]) + Sync,
    ) -> Self {
        let mut block = Self::cut(bytes);
        c.run_chunks(&mut block, len, |start, part| {
            part.fill(0);
            write(start, part);
        });
        block
    }

    fn cut(bytes: usize) -> Self {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = bytes.next_multiple_of(ALIGN);
        if let Some(region) = open.0.upgrade().filter(|region| region.bytes - open.1 >= taken) {
            let start = open.1;
            open.1 += taken;
            return Self { region, start, bytes };
        }
        let region = Arc::new(Region::new(REGION.max(taken.next_multiple_of(PAGE))));
        *open = (Arc::downgrade(&region), taken);
        Self { region, start: 0, bytes }
    }
}

impl Deref for RegionBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range was cut for this block alone, and all of it was written.
        unsafe {
            std::slice::from_raw_parts(self.region.start.add(self.start).as_ptr(), self.bytes)
        }
    }
}

impl DerefMut for RegionBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe {
            std::slice::from_raw_parts_mut(self.region.start.add(self.start).as_ptr(), self.bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_zero_aligned_and_apart() {
        let sizes = [1, 64, 65, 3 << 20, 0, REGION - 64, REGION, REGION + 1, 5 << 20, 5 << 20];
        let mut blocks: Vec<RegionBytes> =
            sizes.iter().map(|bytes| RegionBytes::zeroed(*bytes)).collect();
        for (i, block) in blocks.iter_mut().enumerate() {
            assert!(block.len() == sizes[i] && block.as_ptr().addr().is_multiple_of(ALIGN));
            assert!(block.iter().all(|byte| *byte == 0), "block {i}");
            block.fill(i as u8 + 1);
        }
        for (i, block) in blocks.iter().enumerate() {
            assert!(block.iter().all(|byte| *byte == i as u8 + 1), "block {i}");
        }
    }

    #[test]
    fn a_region_goes_with_its_last_block() {
        let block = RegionBytes::zeroed(REGION);
        let region = Arc::downgrade(&block.region);
        drop(block);
        assert!(region.upgrade().is_none());
    }

    #[test]
    fn any_memory_may_be_asked_for() {
        for bytes in [0, 1, 4095, 4096, 3 * PAGE] {
            let memory = vec![7u8; bytes];
            prefer_large_pages(&memory);
            assert!(memory.iter().all(|byte| *byte == 7));
        }
    }
}
