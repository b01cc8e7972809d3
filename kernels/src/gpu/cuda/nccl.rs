//! Exchanges between the GPUs that compute one model together, over NCCL: one communicator for each
//! rank, all opened at once. NCCL only copies here (`../../ranks/ranks.cu` adds up), so its choice
//! of an algorithm changes no bit.

use super::bind;
use super::failure::not_recording;
use crate::gpu::{Rank, View};
use crate::{Error, Result};
use candle_core::cuda_backend::cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `ncclComm_t`
type Communicator = *mut c_void;

/// `ncclSuccess`, `ncclInProgress` and `ncclUint8` of `nccl.h`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const BYTES: c_int = 1;

// `bind.rs` defines these functions.
unsafe extern "C" {
    fn ncclCommInitAll(made: *mut Communicator, count: c_int, devices: *const c_int) -> c_int;
    fn ncclCommGetAsyncError(of: Communicator, status: *mut c_int) -> c_int;
    fn ncclCommAbort(of: Communicator) -> c_int;
    fn ncclCommDestroy(of: Communicator) -> c_int;
    fn ncclAllGather(
        from: *const c_void,
        to: *mut c_void,
        count: usize,
        kind: c_int,
        of: Communicator,
        stream: CUstream,
    ) -> c_int;
    fn ncclGetErrorString(status: c_int) -> *const c_char;
}

/// A rank's place among its GPUs.
#[derive(Clone)]
pub(super) struct Seat {
    pub rank: Rank,
    group: Arc<NcclGroup>,
}

struct NcclGroup {
    /// By rank.
    communicators: Vec<Communicator>,
    /// Why the ranks exchange nothing any more. Then all communicators have been aborted.
    ended: Mutex<Option<String>>,
}

// SAFETY: a communicator is not bound to a thread. Each is used by the thread of its rank, and
// NCCL lets any thread abort it.
unsafe impl Send for NcclGroup {}
// SAFETY: as above.
unsafe impl Sync for NcclGroup {}

impl Seat {
    /// Opens a communicator for each of these devices, whose ranks are in this order.
    ///
    /// # Errors
    /// [`Error::NoDevice`] says what is missing.
    pub(super) fn of_all(numbers: &[usize]) -> Result<Vec<Self>> {
        bind::bind_nccl().map_err(Error::NoDevice)?;
        let _quiet = not_recording();
        let devices: Vec<c_int> = numbers.iter().map(|number| *number as c_int).collect();
        let (count, mut communicators) = (numbers.len(), vec![null_mut(); numbers.len()]);
        // SAFETY: both arrays have `count` elements.
        let status = unsafe {
            ncclCommInitAll(communicators.as_mut_ptr(), count as c_int, devices.as_ptr())
        };
        checked("open ranks", status)?;
        let group = Arc::new(NcclGroup { communicators, ended: Mutex::default() });
        let seat = |number| Self { rank: Rank { number, count }, group: Arc::clone(&group) };
        Ok((0..count).map(seat).collect())
    }

    /// Gives the exchange to the stream. The views were checked.
    pub(super) fn all_gather(&self, from: View, to: View, stream: CUstream) -> Result<()> {
        self.check()?;
        let (from_address, to_address) = (from.address() as *const _, to.address() as *mut _);
        let communicator = self.group.communicators[self.rank.number];
        // SAFETY: both views are allocated, by their promise, and `to` has room for every rank's
        // part. The communicator was not aborted before the call, and NCCL ends the call if it is
        // aborted meanwhile.
        let status = unsafe {
            ncclAllGather(from_address, to_address, from.bytes(), BYTES, communicator, stream)
        };
        checked("all_gather", status)
    }

    /// Fails if the exchanges have ended, or one that was given to a stream has failed.
    pub(super) fn check(&self) -> Result<()> {
        let ended = self.group.ended();
        if let Some(why) = &*ended {
            return Err(Error::GroupLost { op: "all_gather", detail: why.clone() });
        }
        let mut found = SUCCESS;
        // SAFETY: it is not aborted while `ended` is locked.
        let status = unsafe {
            ncclCommGetAsyncError(self.group.communicators[self.rank.number], &raw mut found)
        };
        checked("all_gather", status)?;
        if found == IN_PROGRESS { Ok(()) } else { checked("all_gather", found) }
    }

    /// Ends all exchanges. Kernels that wait for a rank return, with any result.
    pub(super) fn abandon(&self, why: &str) {
        let mut ended = self.group.ended();
        if ended.is_some() {
            return;
        }
        *ended = Some(why.to_owned());
        for communicator in &self.group.communicators {
            // SAFETY: each is aborted once, and not used after `ended` was set.
            let _ = unsafe { ncclCommAbort(*communicator) };
        }
    }
}

impl NcclGroup {
    fn ended(&self) -> MutexGuard<'_, Option<String>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for NcclGroup {
    /// The last rank has gone, so nothing is exchanged any more.
    fn drop(&mut self) {
        if self.ended().is_some() {
            return;
        }
        let _quiet = not_recording();
        for communicator in &self.communicators {
            // SAFETY: opened by `of_all`, and neither aborted nor used again.
            let _ = unsafe { ncclCommDestroy(*communicator) };
        }
    }
}

fn checked(op: &'static str, status: c_int) -> Result<()> {
    if status == SUCCESS {
        return Ok(());
    }
    // SAFETY: a function of the library returned the status, so the library is bound, and it
    // returns static strings.
    let text = unsafe { CStr::from_ptr(ncclGetErrorString(status)) };
    Err(Error::Device { op, detail: format!("NCCL: {}", text.to_string_lossy()) })
}
