//! Values, refusals and absent functions of a management library that is made here.

use super::*;

const HANDLE: usize = 0x77;
const NOT_SUPPORTED: c_int = 3;
const TIMEOUT: c_int = 10;

/// Writes a value, if the handle is that of the GPU.
fn answer<T>(device: NvmlHandle, to: *mut T, value: T) -> c_int {
    if device as usize != HANDLE {
        return NOT_SUPPORTED;
    }
    // SAFETY: the caller has room for one value.
    unsafe { to.write(value) };
    SUCCESS
}

unsafe extern "C" fn init() -> c_int {
    SUCCESS
}
unsafe extern "C" fn no_init() -> c_int {
    9
}
unsafe extern "C" fn by_bus(place: *const c_char, device: *mut NvmlHandle) -> c_int {
    // SAFETY: a C string.
    let place = unsafe { std::ffi::CStr::from_ptr(place) };
    if place != c"00000000:1b:00.0" {
        return 6;
    }
    answer(HANDLE as NvmlHandle, device, HANDLE as NvmlHandle)
}
unsafe extern "C" fn temperature(device: NvmlHandle, kind: c_int, to: *mut c_uint) -> c_int {
    answer(device, to, 91 + kind.unsigned_abs())
}
unsafe extern "C" fn power(device: NvmlHandle, to: *mut c_uint) -> c_int {
    answer(device, to, 312_500)
}
unsafe extern "C" fn clock(device: NvmlHandle, kind: c_int, to: *mut c_uint) -> c_int {
    answer(device, to, [1, 1980, 3201][kind.unsigned_abs() as usize])
}
unsafe extern "C" fn idle_and_hot(device: NvmlHandle, to: *mut c_ulonglong) -> c_int {
    answer(device, to, 0x1 | 0x4 | 0x20)
}
unsafe extern "C" fn only_idle(device: NvmlHandle, to: *mut c_ulonglong) -> c_int {
    answer(device, to, 0x1 | 0x2)
}
unsafe extern "C" fn errors(
    device: NvmlHandle,
    kind: c_int,
    since: c_int,
    to: *mut c_ulonglong,
) -> c_int {
    answer(device, to, [12, 3][kind.unsigned_abs() as usize] + 100 * u64::from(since != 0))
}
unsafe extern "C" fn remapped(
    device: NvmlHandle,
    corrected: *mut c_uint,
    uncorrected: *mut c_uint,
    pending: *mut c_uint,
    failed: *mut c_uint,
) -> c_int {
    for (to, value) in [(corrected, 4), (uncorrected, 2), (pending, 1)] {
        answer(device, to, value);
    }
    answer(device, failed, 0)
}
unsafe extern "C" fn refuses(_: NvmlHandle, _: *mut c_uint) -> c_int {
    NOT_SUPPORTED
}
unsafe extern "C" fn new_events(set: *mut NvmlHandle) -> c_int {
    answer(HANDLE as NvmlHandle, set, 0x88 as NvmlHandle)
}
unsafe extern "C" fn register(device: NvmlHandle, kinds: c_ulonglong, set: NvmlHandle) -> c_int {
    if device as usize == HANDLE && set as usize == 0x88 && kinds == 8 { SUCCESS } else { 2 }
}
unsafe extern "C" fn cannot_register(_: NvmlHandle, _: c_ulonglong, _: NvmlHandle) -> c_int {
    NOT_SUPPORTED
}
/// Two errors, and then none.
unsafe extern "C" fn wait(set: NvmlHandle, event: *mut NvmlEvent, patience: c_uint) -> c_int {
    static XIDS: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    static FILLED: std::sync::Once = std::sync::Once::new();
    FILLED.call_once(|| XIDS.lock().unwrap().extend([79, 63]));
    assert_eq!((set as usize, patience), (0x88, 0), "nobody waits");
    let Some(data) = XIDS.lock().unwrap().pop() else { return TIMEOUT };
    let device = HANDLE as NvmlHandle;
    let found = NvmlEvent { device, kind: 8, data, gpu_instance: 0, compute_instance: 0 };
    answer(device, event, found)
}

const WHOLE: NvmlFunctions = NvmlFunctions {
    init: Some(init),
    by_bus: Some(by_bus),
    temperature: Some(temperature),
    power: Some(power),
    clock: Some(clock),
    slowdowns: Some(idle_and_hot),
    old_slowdowns: Some(only_idle),
    memory_errors: Some(errors),
    remapped: Some(remapped),
    new_events: Some(new_events),
    register: Some(register),
    wait: Some(wait),
};
const BUS: &str = "00000000:1b:00.0";

#[test]
fn every_value_is_read() {
    let sensor = WHOLE.sensor(BUS).unwrap();
    let found = sensor.read();
    let expect = GpuHealth {
        celsius: Some(91),
        watts: Some(312.5),
        sm_mhz: Some(1980),
        memory_mhz: Some(3201),
        slowdowns: Some(vec![Slowdown::PowerCap, Slowdown::Heat]),
        corrected_errors: Some(12),
        uncorrected_errors: Some(3),
        remapped: Some(RemappedRows {
            corrected: 4,
            uncorrected: 2,
            is_pending: true,
            has_failed: false,
        }),
        last_xid: Some(79),
    };
    assert_eq!(found, expect);
    assert_eq!(sensor.read().last_xid, Some(79), "the last error stands");
    let text =
        "91 °C, 312 W, 1980 MHz, slowed by power_cap and heat, uncorrected errors: 3, Xid 79";
    assert_eq!(found.to_string(), text);
    assert_eq!(found.concerns().len(), 4, "{:?}", found.concerns());
}

#[test]
fn what_a_driver_does_not_tell_is_absent() {
    type Change = fn(&mut NvmlFunctions);
    let check = |change: Change, differs: fn(&mut GpuHealth)| {
        let [mut functions, mut whole] = [WHOLE; 2];
        whole.new_events = None;
        functions.new_events = None;
        change(&mut functions);
        let mut expect = whole.sensor(BUS).unwrap().read();
        assert_eq!(expect.last_xid, None);
        differs(&mut expect);
        assert_eq!(functions.sensor(BUS).unwrap().read(), expect);
    };
    check(|all| all.temperature = None, |found| found.celsius = None);
    check(|all| all.power = None, |found| found.watts = None);
    check(|all| all.power = Some(refuses), |found| found.watts = None);
    check(|all| all.clock = None, |found| (found.sm_mhz, found.memory_mhz) = (None, None));
    check(|all| all.slowdowns = None, |found| found.slowdowns = Some(Vec::new()));
    check(|all| (all.slowdowns, all.old_slowdowns) = (None, None), |found| found.slowdowns = None);
    check(
        |all| all.memory_errors = None,
        |found| (found.corrected_errors, found.uncorrected_errors) = (None, None),
    );
    check(|all| all.remapped = None, |found| found.remapped = None);
    let cannot_register: Change = |all| {
        all.new_events = Some(new_events);
        all.register = Some(cannot_register);
    };
    check(cannot_register, |_| ());
    let least = NvmlFunctions { init: Some(init), by_bus: Some(by_bus), ..Default::default() };
    let least = least.sensor(BUS).unwrap().read();
    assert_eq!((least.to_string(), least.concerns().len()), ("it tells nothing".into(), 0));
}

#[test]
fn a_library_that_cannot_be_used_is_told_in_a_sentence() {
    let refused = |functions: NvmlFunctions, bus: &str| functions.sensor(bus).unwrap_err();
    assert!(refused(NvmlFunctions::default(), BUS).contains("too old"));
    let broken = NvmlFunctions { init: Some(no_init), ..WHOLE };
    assert_eq!(refused(broken, BUS), "NVML cannot be used (status 9)");
    let unknown = refused(WHOLE, "00000000:1c:00.0");
    assert_eq!(unknown, "NVML does not know the GPU at 00000000:1c:00.0 (status 6)");
}
