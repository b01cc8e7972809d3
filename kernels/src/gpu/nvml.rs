//! Asks the driver's management library (NVML) for the condition of a GPU. Any of its functions may
//! be absent or refuse; then a value is absent, and nothing fails.

use super::health::{GpuHealth, GpuSensor, RemappedRows, Slowdown};
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// `nvmlDevice_t` and `nvmlEventSet_t`.
type NvmlHandle = *mut c_void;

/// `NVML_SUCCESS`, `NVML_TEMPERATURE_GPU`, `NVML_CLOCK_SM`, `NVML_CLOCK_MEM`,
/// `NVML_MEMORY_ERROR_TYPE_CORRECTED` and `…_UNCORRECTED`, `NVML_VOLATILE_ECC` and
/// `nvmlEventTypeXidCriticalError` of `nvml.h`.
const SUCCESS: c_int = 0;
const TEMPERATURE_GPU: c_int = 0;
const CLOCK_SM: c_int = 1;
const CLOCK_MEMORY: c_int = 2;
const CORRECTED: c_int = 0;
const UNCORRECTED: c_int = 1;
const SINCE_LOADED: c_int = 0;
const XID_EVENTS: c_ulonglong = 8;

/// Events that are taken at a reading, at most: a GPU that fails may report many.
const MOST_EVENTS: usize = 64;

/// `nvmlEventData_t`
#[repr(C)]
struct NvmlEvent {
    device: NvmlHandle,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

macro_rules! functions {
    ($($field:ident $name:literal: fn($($argument:ty),*);)*) => {
        /// The functions of the library. One that it lacks is `None`.
        #[derive(Clone, Copy, Default)]
        pub(super) struct NvmlFunctions {
            $($field: Option<unsafe extern "C" fn($($argument),*) -> c_int>,)*
        }

        impl NvmlFunctions {
            /// Takes the address of each function by its name, a C string; null if there is none.
            ///
            /// # Safety
            /// Each address is that of NVML's function of this name, for as long as the process
            /// lives.
            #[cfg(feature = "cuda")]
            pub(super) unsafe fn of(address: impl Fn(&'static [u8]) -> *mut c_void) -> Self {
                Self {
                    // SAFETY: by the caller's promise; a pointer has the size of a function
                    // pointer, and null becomes `None`.
                    $($field: unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            Option<unsafe extern "C" fn($($argument),*) -> c_int>,
                        >(address(concat!($name, "\0").as_bytes()))
                    },)*
                }
            }
        }
    };
}

functions! {
    init "nvmlInit_v2": fn();
    by_bus "nvmlDeviceGetHandleByPciBusId_v2": fn(*const c_char, *mut NvmlHandle);
    temperature "nvmlDeviceGetTemperature": fn(NvmlHandle, c_int, *mut c_uint);
    power "nvmlDeviceGetPowerUsage": fn(NvmlHandle, *mut c_uint);
    clock "nvmlDeviceGetClockInfo": fn(NvmlHandle, c_int, *mut c_uint);
    slowdowns "nvmlDeviceGetCurrentClocksEventReasons": fn(NvmlHandle, *mut c_ulonglong);
    // The name of drivers before 535.
    old_slowdowns "nvmlDeviceGetCurrentClocksThrottleReasons": fn(NvmlHandle, *mut c_ulonglong);
    memory_errors "nvmlDeviceGetTotalEccErrors":
        fn(NvmlHandle, c_int, c_int, *mut c_ulonglong);
    remapped "nvmlDeviceGetRemappedRows":
        fn(NvmlHandle, *mut c_uint, *mut c_uint, *mut c_uint, *mut c_uint);
    new_events "nvmlEventSetCreate": fn(*mut NvmlHandle);
    register "nvmlDeviceRegisterEvents": fn(NvmlHandle, c_ulonglong, NvmlHandle);
    wait "nvmlEventSetWait_v2": fn(NvmlHandle, *mut NvmlEvent, c_uint);
}

/// A GPU of the library, which any thread may ask.
struct NvmlDevice {
    functions: NvmlFunctions,
    device: NvmlHandle,
    /// The set in which the driver puts its errors, if it reports them.
    events: Option<Mutex<NvmlHandle>>,
    last_xid: AtomicU64,
}

// SAFETY: handles are not bound to a thread, and the library may be called from several.
unsafe impl Send for NvmlDevice {}
// SAFETY: as above; a mutex lets one thread at a time take events.
unsafe impl Sync for NvmlDevice {}

impl NvmlFunctions {
    /// The sensor of the GPU at this place of the PCI bus, as in `00000000:1b:00.0`. CUDA and NVML
    /// number GPUs differently, so that the place alone names one.
    ///
    /// # Errors
    /// A sentence that says what is missing.
    pub(super) fn sensor(self, bus: &str) -> Result<GpuSensor, String> {
        let refused = |what: &str, status: c_int| format!("NVML {what} (status {status})");
        let (Some(init), Some(by_bus)) = (self.init, self.by_bus) else {
            return Err("the driver's NVML is too old".into());
        };
        // SAFETY: it may be called more than once.
        let status = unsafe { init() };
        if status != SUCCESS {
            return Err(refused("cannot be used", status));
        }
        let place = CString::new(bus).map_err(|error| error.to_string())?;
        let mut device = null_mut();
        // SAFETY: a C string, and room for one handle.
        let status = unsafe { by_bus(place.as_ptr(), &raw mut device) };
        if status != SUCCESS {
            return Err(refused(&format!("does not know the GPU at {bus}"), status));
        }
        let events = self.events(device).map(Mutex::new);
        let found = NvmlDevice { functions: self, device, events, last_xid: AtomicU64::new(0) };
        Ok(GpuSensor::new(move || found.read()))
    }

    /// A set in which the device's errors will be found; never freed, as the sensor lives as long
    /// as the process.
    fn events(&self, device: NvmlHandle) -> Option<NvmlHandle> {
        let (create, register, _) = (self.new_events?, self.register?, self.wait?);
        // SAFETY: room for one handle.
        let set = told(null_mut(), |set| unsafe { create(set) })?;
        // SAFETY: both handles are live.
        (unsafe { register(device, XID_EVENTS, set) } == SUCCESS).then_some(set)
    }
}

/// The value that a function writes, if it succeeds.
fn told<T>(mut value: T, ask: impl FnOnce(*mut T) -> c_int) -> Option<T> {
    (ask(&raw mut value) == SUCCESS).then_some(value)
}

impl NvmlDevice {
    fn read(&self) -> GpuHealth {
        let ask = &self.functions;
        let slowdowns = self.tells(ask.slowdowns.or(ask.old_slowdowns));
        let named = |bits: u64| Slowdown::ALL.into_iter().filter(move |(_, bit)| bits & bit > 0);
        GpuHealth {
            celsius: self.tells_of(ask.temperature, TEMPERATURE_GPU),
            watts: self.tells(ask.power).map(|milliwatts| f64::from(milliwatts) / 1000.0),
            sm_mhz: self.tells_of(ask.clock, CLOCK_SM),
            memory_mhz: self.tells_of(ask.clock, CLOCK_MEMORY),
            slowdowns: slowdowns.map(|bits| named(bits).map(|(name, _)| name).collect()),
            corrected_errors: self.memory_errors(CORRECTED),
            uncorrected_errors: self.memory_errors(UNCORRECTED),
            remapped: self.remapped(),
            last_xid: self.last_xid(),
        }
    }

    fn tells<T: Default>(
        &self,
        ask: Option<unsafe extern "C" fn(NvmlHandle, *mut T) -> c_int>,
    ) -> Option<T> {
        let ask = ask?;
        // SAFETY: the handle is live, and the function writes one value.
        told(T::default(), |to| unsafe { ask(self.device, to) })
    }

    fn tells_of(
        &self,
        ask: Option<unsafe extern "C" fn(NvmlHandle, c_int, *mut c_uint) -> c_int>,
        kind: c_int,
    ) -> Option<c_uint> {
        let ask = ask?;
        // SAFETY: the handle is live, and the function writes one value.
        told(0, |to| unsafe { ask(self.device, kind, to) })
    }

    fn memory_errors(&self, kind: c_int) -> Option<u64> {
        let ask = self.functions.memory_errors?;
        // SAFETY: the handle is live, and the function writes one value.
        told(0, |to| unsafe { ask(self.device, kind, SINCE_LOADED, to) })
    }

    fn remapped(&self) -> Option<RemappedRows> {
        let of = self.functions.remapped?;
        let [mut corrected, mut uncorrected, mut pending, mut failed] = [0; 4];
        // SAFETY: the handle is live, and each pointer has room for one value.
        let status = unsafe {
            let (pending, failed) = (&raw mut pending, &raw mut failed);
            of(self.device, &raw mut corrected, &raw mut uncorrected, pending, failed)
        };
        let (is_pending, has_failed) = (pending > 0, failed > 0);
        let found = RemappedRows { corrected, uncorrected, is_pending, has_failed };
        (status == SUCCESS).then_some(found)
    }

    /// Takes the errors that were reported since the last time, without waiting for one.
    fn last_xid(&self) -> Option<u64> {
        let (set, wait) = (self.events.as_ref()?.lock().ok()?, self.functions.wait?);
        for _ in 0..MOST_EVENTS {
            let none = NvmlEvent {
                device: null_mut(),
                kind: 0,
                data: 0,
                gpu_instance: 0,
                compute_instance: 0,
            };
            // SAFETY: the set is live, and one thread at a time uses it.
            let Some(event) = told(none, |to| unsafe { wait(*set, to, 0) }) else { break };
            self.last_xid.store(event.data, Ordering::Relaxed);
        }
        Some(self.last_xid.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests;
