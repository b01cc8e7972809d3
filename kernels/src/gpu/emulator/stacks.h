// Switching between the stacks of the emulator's threads.
#pragma once

#include <cstddef>

// Keeps the registers that a function must restore on the stack, as the word `RETURN_WORD` of
// `FRAME_WORDS` the address to return to, then goes on with another stack that was left so.
extern "C" void simt_switch(void** from, void* to);
#ifdef __x86_64__
// With one word more than are kept, so that the stack is then as after a call.
constexpr size_t FRAME_WORDS = 8, RETURN_WORD = 6;
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size simt_switch,.-simt_switch
)");
#elif defined(__aarch64__)
constexpr size_t FRAME_WORDS = 20, RETURN_WORD = 11;
asm(R"(
.text
.globl simt_switch
.type simt_switch,%function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size simt_switch,.-simt_switch
)");
#else
#error "the emulator switches stacks in the assembly of x86-64 and aarch64"
#endif
