//! One output that tasks share.

use std::marker::PhantomData;
use std::ops::Range;

/// An output of which the tasks of one `Compute::run` write disjoint parts.
pub(crate) struct Parts<'a, T = f32> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: the pointer is that of a `&mut [T]`, and callers of `slice` promise disjoint ranges.
unsafe impl<T: Send> Send for Parts<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(whole: &'a mut [T]) -> Self {
        Self { start: whole.as_mut_ptr(), len: whole.len(), owner: PhantomData }
    }

    /// The values in `range`.
    ///
    /// # Safety
    /// No two live slices overlap.
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "part {range:?} of an output of {} values",
            self.len
        );
        // SAFETY: in bounds by the assertion; unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The values in `range`, for reading: tasks may share them.
    ///
    /// # Safety
    /// No live slice that can be written overlaps.
    pub(crate) unsafe fn shared(&self, range: Range<usize>) -> &'a [T] {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "part {range:?} of values {}",
            self.len
        );
        // SAFETY: in bounds by the assertion; not written meanwhile by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// A pointer to the value at `index`, from which a task writes the values that it owns.
    pub(crate) fn at(&self, index: usize) -> *mut T {
        assert!(index <= self.len, "index {index} of an output of {} values", self.len);
        self.start.wrapping_add(index)
    }
}
